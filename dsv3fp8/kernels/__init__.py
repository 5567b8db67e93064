"""One folder a kernel: reference.py (torch, runs anywhere) is the specification; `backend` chooses and says why."""
