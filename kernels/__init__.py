"""The codecs' kernels (imported as `fsdp_ciera.kernels`): a readable torch reference, and NumPy forms for one host core.

Codecs import them from `ops`, which chooses; `reference` is the yardstick.
"""
