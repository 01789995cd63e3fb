# All images of padfree:
#   client    `padfree` and `trainer_client` with numpy and pyarrow: what a training image needs
#   worker    a Ray node that packs, or Ray's head
#   service   the HTTP service
#   demo      a trainer on the sample data, with torch and transformers
#
# Any base with Python 3.11, pip and bash serves; its mirrors and certificates are used as they are.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

# Stands for a folder of wheels; put another in its place with --build-context wheels=FOLDER.
FROM scratch AS wheels

FROM ${PYTHON_IMAGE} AS base
ENV PATH=/opt/padfree/bin:$PATH \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
# The home lies in /tmp, the one folder besides the volumes that must be writable.
RUN groupadd --gid 10001 padfree \
 && useradd --uid 10001 --gid 10001 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin padfree \
 && python -m venv --without-pip /opt/padfree
WORKDIR /app


FROM base AS wheel
RUN python -m venv /opt/build
COPY deploy/requirements/build.txt /opt/build/requirements.txt
RUN /opt/build/bin/pip install --require-hashes -r /opt/build/requirements.txt
COPY pyproject.toml README.md LICENSE ./
COPY packer packer
COPY service service
COPY trainer_client trainer_client
COPY padfree padfree
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /dist .


FROM base AS client
COPY deploy/requirements/client.txt /opt/requirements.txt
RUN pip --python /opt/padfree install --require-hashes -r /opt/requirements.txt
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    pip --python /opt/padfree install --no-deps /dist/*.whl
USER 10001:10001
ENTRYPOINT ["padfree"]
CMD ["--help"]


FROM base AS worker
# Owned by the user from the start: a new named volume takes its owner from here.
RUN install -d -o padfree -g padfree /store /cache /data /run/padfree
COPY deploy/requirements/service.txt /opt/requirements.txt
RUN pip --python /opt/padfree install --require-hashes -r /opt/requirements.txt
COPY deploy/padfree-node /usr/local/bin/padfree-node
COPY examples/data examples/data
COPY examples/tokenizer examples/tokenizer
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    pip --python /opt/padfree install --no-deps /dist/*.whl
# Sources may lie in /data and in the examples. No compiling of Ray's many files when a node starts.
ENV PADFREE_STORE=/store \
    PADFREE_CACHE_DIR=/cache \
    PADFREE_DATA_ROOTS=/data:/app \
    PADFREE_HOST=0.0.0.0 \
    RAY_USAGE_STATS_ENABLED=0 \
    RAY_ENABLE_UV_RUN_RUNTIME_ENV=0
USER 10001:10001
ENTRYPOINT ["padfree-node"]
CMD ["worker"]


FROM worker AS service
EXPOSE 8000
CMD ["service"]


FROM base AS demo
COPY deploy/requirements/demo.txt /opt/requirements.txt
RUN pip --python /opt/padfree install --require-hashes -r /opt/requirements.txt
COPY requirements-torch.txt /opt/requirements-torch.txt
# pip's options for torch alone, for example another index with builds for the CPU.
ARG TORCH_OPTIONS=
RUN --mount=type=bind,from=wheels,target=/wheels \
    pip --python /opt/padfree install --find-links /wheels ${TORCH_OPTIONS} \
    -r /opt/requirements-torch.txt
COPY examples examples
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    pip --python /opt/padfree install --no-deps /dist/*.whl
USER 10001:10001
ENTRYPOINT ["python"]
CMD ["examples/demo.py", "--help"]
