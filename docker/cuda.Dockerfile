# Both engines on NVIDIA's GPUs: peagle in vLLM's own image, with its torch.
#   docker build -f docker/cuda.Dockerfile -t peagle:cuda .
# The entrypoint is that of SageMaker: $PEAGLE_SERVE has the arguments (peagle/deploy/container.py).
# Elsewhere give a command: docker run --gpus all --entrypoint peagle peagle:cuda serve ...
FROM vllm/vllm-openai:v0.32.0
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
LABEL com.amazonaws.sagemaker.capabilities.accept-bind-to-port=true
WORKDIR /opt/peagle
COPY constraints-vllm.txt pyproject.toml README.md LICENSE ./
COPY peagle ./peagle
COPY heads ./heads
# In place, so that the catalog finds the heads next to the package.
RUN python3 -m pip install --constraint constraints-vllm.txt --editable '.[serve]' \
    && useradd --uid 10001 --create-home peagle
USER 10001
EXPOSE 8080
ENTRYPOINT ["python3", "-m", "peagle.deploy.container"]
CMD ["serve"]
