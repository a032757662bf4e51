"""Imported once, by the fork server, so that each worker starts with torch already in memory.

One thread for every numeric library: a worker sets its own number of torch threads after the fork.
"""

import os

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"

import torch  # noqa: E402, F401

import contraflow.runtime.process  # noqa: E402, F401
