# The payload of a library: payload.bin lies beside this file when it is assembled. Nothing else reads the section.
    .section .attnres,"a",%progbits
    .balign 64
    .globl attnres_payload
    .hidden attnres_payload
    .type attnres_payload, %object
attnres_payload:
    .incbin "payload.bin"
    .size attnres_payload, . - attnres_payload
    .section .note.GNU-stack,"",%progbits
