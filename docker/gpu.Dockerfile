# For NVIDIA GPUs from Ampere on, with driver 580 or newer and NVIDIA's container toolkit:
#
#   docker build --file docker/gpu.Dockerfile --tag tramontane-gpu .
#   docker run --rm --interactive --tty --gpus all --shm-size 16g --volume "$PWD/runs:/home/user/runs" \
#     tramontane-gpu tramontane train configs/quickstart.yaml
#
# PyPI's build of torch brings CUDA itself; the compiler is for kernels that torch.compile and Triton
# build. For older drivers: `--build-arg TORCH='torch==2.13.0+cu126 --index-url
# https://download.pytorch.org/whl/cu126'`.
FROM python:3.11-slim-bookworm
ARG TORCH=torch==2.13.0
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc g++ libc6-dev \
 && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home user
ENV PATH=/opt/tramontane/bin:$PATH PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/tramontane
RUN python -m pip install $TORCH
WORKDIR /opt/source
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY src src
RUN python -m pip install --constraint requirements.lock '.[train,lora,gguf,view,ray,trackers]'
WORKDIR /home/user
COPY --chown=user configs configs
COPY --chown=user examples examples
RUN install --directory --owner=user runs
USER user
CMD ["tramontane", "--help"]
