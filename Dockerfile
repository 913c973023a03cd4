# The image of this checkout, for GPUs or, with --target cpu, without.
#
#   docker build -t megatron-pretrain .
#   docker build --build-arg APEX=1 -t megatron-pretrain .        with NVIDIA's apex, which is compiled
#   docker build --target cpu --build-arg TORCH_INDEX_URL=... -t megatron-pretrain:cpu .
#   docker run --rm --gpus all --ipc=host megatron-pretrain python pretrain_gpt.py --help
#
# TORCH_INDEX_URL is where pip finds torch, and only torch: for GPUs as for CPUs, the index of the wanted build; by
# default where it finds everything else. No engine has built it, and apex was never compiled by it. Tests lint it, run
# what it installs in an environment of their own (tests/unit/test_dockerfile.py), and take the steps of the CPU image in
# a bare Debian, with its Python (tests/unit/test_debian.py).
#
# Base images are named by digest, which a tag that moves does not change. The digest of a newer tag:
#   docker buildx imagetools inspect python:3.12-slim --format '{{.Manifest.Digest}}'
# A GPU image contains NVIDIA's libraries, under NVIDIA's own licence: read it before you publish one.
ARG PYTHON_IMAGE=python:3.12.14-slim-trixie@sha256:78387bc3881b8273120a12ebe6c1ab22b018ccc2c9adf565ae1ac9b536e184ea
ARG CUDA_IMAGE=nvidia/cuda:13.0.2-devel-ubuntu24.04@sha256:5dc1bca23d05bd37b011be68ec470c03b403a5da07ec3a86e41af9470e9d0cc6
ARG APEX=0

# hadolint ignore=DL3006
FROM ${PYTHON_IMAGE} AS base
# g++: torch.compile; git: which commit a run is of; the rest: InfiniBand's user half, which NCCL loads if it is there
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git ibverbs-providers libibverbs1 librdmacm1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 megatron
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /megatron

# Packages before code: a change of the code costs no download.
FROM base AS packages
ARG TORCH_INDEX_URL
COPY requirements.txt .
# hadolint ignore=DL3013
RUN torch=$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' requirements.txt) \
    && pip install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} --no-deps "$torch" \
    && pip install --no-deps --require-hashes -r requirements.txt \
    && pip install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$torch"

FROM packages AS code
COPY . .
RUN pip install --no-deps --no-build-isolation --editable . \
    && python -m compileall -q megatron

FROM code AS cpu
USER 1000

# A compiler of the CUDA version that torch was built with, else apex refuses: python -c "import torch; print(torch.version.cuda)"
# hadolint ignore=DL3006
FROM ${CUDA_IMAGE} AS toolkit

FROM packages AS apex-1
# a commit, because it is compiled: of 8 July 2026
ARG APEX_REVISION=6424da3b4faa6c8f062da4a48c424fff3f02d42d
ENV APEX_CPP_EXT=1 APEX_CUDA_EXT=1 CUDA_HOME=/usr/local/cuda TORCH_CUDA_ARCH_LIST="8.0 9.0 10.0"
COPY --from=toolkit /usr/local/cuda /usr/local/cuda
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheels "git+https://github.com/NVIDIA/apex@$APEX_REVISION"

FROM base AS apex-0
RUN mkdir /wheels

# hadolint ignore=DL3006
FROM apex-${APEX} AS apex

FROM code AS gpu
COPY --from=apex /wheels /wheels
RUN find /wheels -name '*.whl' -exec pip install --no-deps {} +
USER 1000
