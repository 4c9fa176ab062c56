"""The codecs' kernels (imported as `fsdp_ciera.kernels`): `reference` in readable torch, the yardstick; `host`, compiled for
CPU; `cuda`, launched from PTX. `dispatch.kernels_of` chooses; nobody else does.
"""
