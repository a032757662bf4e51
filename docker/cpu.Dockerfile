# The image of pools without GPUs: the head, the buffer, the submitter. From the repository's root:
#   docker build -f docker/cpu.Dockerfile -t my-registry/contraflow-cpu:0.1.0 .
# It has not been built yet.
FROM python:3.12-slim-bookworm

ARG TORCH=2.13.0
ARG RAY=2.60.0

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

RUN pip install torch==${TORCH} --index-url https://download.pytorch.org/whl/cpu && pip install "ray[default]==${RAY}" awscli

COPY . /opt/contraflow
RUN pip install /opt/contraflow

# Last, so that nothing after it can replace what it has looked at.
RUN contraflow eks versions --image cpu
