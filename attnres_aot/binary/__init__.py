"""What a compiled image's binary says: its ELF, its kernels' facts, their proof against what was asked, its code."""
