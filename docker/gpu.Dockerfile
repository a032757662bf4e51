# The image of pools with GPUs, for Hopper and Blackwell with EFA. Versions are those of contraflow/cluster/versions.py (a test holds
# them equal). From the repository's root:
#   docker build -f docker/gpu.Dockerfile --build-arg DEEPEP_COMMIT=... -t my-registry/contraflow-gpu:0.1.0 .
# It has not been built yet.
ARG CUDA_TOOLKIT=13.1.2
FROM nvidia/cuda:${CUDA_TOOLKIT}-devel-ubuntu24.04

ARG TORCH=2.13.0
ARG TORCH_INDEX=cu130
ARG NCCL=2.31.2
ARG NVSHMEM=3.7.2
ARG EFA_INSTALLER=1.50.0
ARG GDRCOPY=2.5.2
ARG RAY=2.60.0
# A commit of amazon-contributing/DeepEP. Upstream's b306af06 precedes every fix for EFA: it opens more queue pairs than EFA has.
ARG DEEPEP_COMMIT
ARG ARCHITECTURES="9.0;10.0;10.3"

ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# Distributions' RDMA and NCCL libraries would be found before those below; cuda-compat shadows the node's driver.
RUN apt-get update \
 && apt-get remove -y --allow-change-held-packages ibverbs-utils libibverbs-dev libibverbs1 libnccl2 libnccl-dev || true \
 && apt-get purge -y 'cuda-compat-*' || true \
 && apt-get install -y --no-install-recommends build-essential ca-certificates cmake curl git ninja-build python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*

RUN python3 -m venv /opt/run
ENV PATH=/opt/run/bin:$PATH

# GDRCopy's library; its kernel module is the node's.
RUN git clone --depth 1 -b v${GDRCOPY} https://github.com/NVIDIA/gdrcopy.git /tmp/gdrcopy \
 && make -C /tmp/gdrcopy prefix=/opt/gdrcopy lib_install && rm -rf /tmp/gdrcopy

# libfabric, rdma-core and NCCL's plugin for EFA; the kernel module is the node's.
RUN apt-get update \
 && curl -fsSL https://efa-installer.amazonaws.com/aws-efa-installer-${EFA_INSTALLER}.tar.gz | tar -xz -C /tmp \
 && cd /tmp/aws-efa-installer && ./efa_installer.sh -y --skip-kmod --skip-limit-conf --no-verify --skip-mpi --disable-ngc \
 && rm -rf /tmp/aws-efa-installer /var/lib/apt/lists/*
ENV LD_LIBRARY_PATH=/opt/amazon/efa/lib:/opt/amazon/ofi-nccl/lib:/opt/gdrcopy/lib

RUN pip install torch==${TORCH} --index-url https://download.pytorch.org/whl/${TORCH_INDEX} \
 && pip install "ray[default]==${RAY}" awscli

# DeepEP builds against the NCCL it will run with, so that comes first, without its wishes for other packages.
RUN pip install --no-deps nvidia-nccl-cu13==${NCCL} nvidia-nvshmem-cu13==${NVSHMEM}
RUN test -n "${DEEPEP_COMMIT}" || { echo "give --build-arg DEEPEP_COMMIT: a commit of amazon-contributing/DeepEP" >&2; exit 1; } \
 ; git clone https://github.com/amazon-contributing/DeepEP.git /tmp/deepep && cd /tmp/deepep && git checkout ${DEEPEP_COMMIT} \
 && TORCH_CUDA_ARCH_LIST="${ARCHITECTURES}" pip install --no-deps --no-build-isolation . && rm -rf /tmp/deepep

COPY . /opt/contraflow
RUN pip install /opt/contraflow

# Last: an install above may have brought other versions of these. Then what is loaded is held to the list, or there is no image.
RUN pip install --no-deps --force-reinstall nvidia-nccl-cu13==${NCCL} nvidia-nvshmem-cu13==${NVSHMEM}
RUN contraflow eks versions --image gpu
