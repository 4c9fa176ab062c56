"""The pictures that commands draw. All need matplotlib, and raise `ImportError` without it."""
