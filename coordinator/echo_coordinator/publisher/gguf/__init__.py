"""Writing a version's weights as GGUF, for peers that sample with llama.cpp.

    config.json ─► shape (what is it, can it be written?) ─► layout (names, shapes, stored types)
    model.safetensors ─► source (blocks of float32 rows) ──► write ─► model.gguf

`convert` runs this in a child process: numpy's memory and a crash stay there. No vocabulary is written: between peers
only token ids travel, so llama.cpp is told that there is none.
"""
