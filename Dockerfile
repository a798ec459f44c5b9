# Serves on CPUs and on NVIDIA GPUs, from the wheel of this checkout. In the repository's root:
#
#   docker build -t agentspec .
#   docker run --rm --init -p 127.0.0.1:8000:8000 agentspec
#   docker run --rm --init -p 127.0.0.1:8000:8000 --gpus all -v "$PWD/checkpoints:/checkpoints:ro" agentspec \
#       serve /checkpoints/NAME --host 0.0.0.0
#
# PyPI's torch, the default, has CUDA with it (several GB) and serves on CPUs too. For CPUs alone, some 200 MB:
#
#   docker build -t agentspec:cpu --build-arg TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu" .

FROM python:3.12-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY agentspec ./agentspec
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
# On a GPU, Triton compiles a launcher in C beside its kernels.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ARG TORCH="torch==2.13.0"
RUN pip install --no-cache-dir ${TORCH}
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir /wheels/*.whl

# Checkpoints by hub id and compiled kernels are kept in this user's home: mount a volume there to keep them.
RUN useradd --create-home --uid 10001 agentspec
USER agentspec
WORKDIR /home/agentspec

EXPOSE 8000
# /live says whether the server should be started again; it answers while the model is still loading.
HEALTHCHECK --interval=30s --timeout=10s --start-period=30s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/live', timeout=8)"]
ENTRYPOINT ["agentspec"]
CMD ["serve", "--host", "0.0.0.0"]
