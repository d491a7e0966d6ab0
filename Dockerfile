# The server in NVIDIA's Triton container. Build: docker build -t music3 .
# Python 3.12 and the Python backend come with the container (3.12 in every one since 24.11); PyTorch and the rest
# come from pyproject.toml's pins. Which container: docs/operating.md.
ARG TRITON_RELEASE=26.07
FROM nvcr.io/nvidia/tritonserver:${TRITON_RELEASE}-py3

# tini is process 1: it passes signals on and reaps. A server that were process 1 itself could not be ended from
# within its container, which is what happens when the process of a model has died.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3-venv tini \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /app
# PyTorch first: its layer of several GB stays as long as its version does. A GPU isn't there while an image is
# built, so build.sh would take the CPU build.
COPY pyproject.toml ./
RUN python3 -m venv .venv \
    && .venv/bin/python -m pip install --no-cache-dir "$(sed -n 's/^ *"\(torch==[^"]*\)",$/\1/p' pyproject.toml)"

COPY README.md build.sh ./
COPY scripts scripts
COPY client client
COPY python_backend_models python_backend_models
COPY model_repository model_repository
COPY deploy/entrypoint.sh deploy/entrypoint.sh
RUN ./build.sh env \
    && .venv/bin/python -m pip install --no-cache-dir --no-build-isolation --editable ".[model,gateway]" \
    && install -d -o 1000 -g 1000 .cache

# Nothing in the image belongs to this user but .cache, which may be a tmpfs where the image is read-only.
USER 1000:1000
ENV MUSIC3_CHECKPOINT=/checkpoint \
    MUSIC3_DRAIN_S=0 \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1
VOLUME /checkpoint
EXPOSE 8000 8001 8002
STOPSIGNAL SIGTERM
# Loading 28.5 GB and recording graphs takes minutes; until then a failing check counts for nothing.
HEALTHCHECK --interval=15s --timeout=12s --retries=3 --start-period=30m \
    CMD ["/app/.venv/bin/python", "-m", "client.probe", "--timeout", "10"]
ENTRYPOINT ["tini", "--", "/app/deploy/entrypoint.sh"]
CMD ["--host", "0.0.0.0"]
