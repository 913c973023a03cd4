# A CPU or GPU image of the checkout; no test builds it.
#   docker build --build-arg TORCH_INDEX_URL=... -t megatron-pretrain .
#   docker run --rm -it --gpus all --ipc=host megatron-pretrain python pretrain_gpt.py --help
FROM python:3.12-slim
ARG TORCH_INDEX_URL
WORKDIR /megatron
COPY . .
RUN bash -c 'source tools/setup_env.sh'
ENV PATH=/megatron/.venv/bin:$PATH
