"""Programs that mutate what people and machines hand over, and see what the commands say."""
