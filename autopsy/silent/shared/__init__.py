"""
Shared: what several checks need.

No check stands here, and no file here imports another one of silent/.
"""
