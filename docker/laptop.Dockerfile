# For a machine without a GPU, x86-64 or arm64:
#
#   docker build --file docker/laptop.Dockerfile --tag tramontane .
#   docker run --rm --interactive --tty --volume "$PWD/runs:/home/user/runs" tramontane \
#     tramontane train configs/quickstart.yaml
#
# Programs that a model writes run in the Landlock rung of the sandbox, with the seccomp profile that
# Docker has by default; `tramontane doctor` in the container says what works.
FROM python:3.11-slim-bookworm
RUN useradd --create-home user
ENV PATH=/opt/tramontane/bin:$PATH PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/tramontane
RUN python -m pip install torch==2.13.0+cpu --index-url https://download.pytorch.org/whl/cpu
WORKDIR /opt/source
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY src src
RUN python -m pip install --constraint requirements.lock '.[train,lora,gguf,view]'
WORKDIR /home/user
COPY --chown=user configs configs
COPY --chown=user examples examples
RUN install --directory --owner=user runs
USER user
CMD ["tramontane", "--help"]
