"""The fork server of a test session: processes that tests start have what they need in memory, and cost a fork.

The first start decides what the server holds, whoever asks; so all ask here, or use the fixture `fork_server`.
"""

import multiprocessing
from multiprocessing.context import ForkServerContext

PRELOAD = [
    "contraflow.runtime.preload",
    "contraflow.rollout.worker",
    "contraflow.train.worker",
    "contraflow.cuts",
    "contraflow.weights.publish",
    "hypothesis",  # this and pytest are imported by test modules, whose functions the processes run
    "pytest",
]


def forking() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context
