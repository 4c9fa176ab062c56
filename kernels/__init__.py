"""The codecs' kernels (imported as `fsdp_ciera.kernels`). So far: the torch reference."""
