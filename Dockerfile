# What ampx says of an NVIDIA GPU, and everything else that the command does:
#   docker build --tag ampx .
#   docker run --rm --gpus all ampx
#   docker run --rm --gpus all --volume "$PWD:/home/trainer/work" --workdir /home/trainer/work ampx compare train.py
# For JAX: docker build --build-arg EXTRA=jax --build-arg ALSO='jax[cuda12]' --tag ampx .
# For TensorFlow: docker build --build-arg EXTRA=tensorflow --build-arg ALSO='tensorflow[and-cuda]' --tag ampx .
ARG CUDA=12.8.1
FROM nvidia/cuda:${CUDA}-base-ubuntu24.04
ARG EXTRA=torch
ARG ALSO=""
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3-venv \
 && rm -rf /var/lib/apt/lists/* \
 && python3 -m venv /opt/ampx
ENV PATH=/opt/ampx/bin:$PATH
COPY LICENSE README.md pyproject.toml /src/
COPY ampx /src/ampx
COPY backends /src/backends
COPY constraints /src/constraints
RUN python -m pip install --no-cache-dir "/src[$EXTRA]" $ALSO --constraint "/src/constraints/$EXTRA.txt"
RUN useradd --create-home trainer
USER trainer
WORKDIR /home/trainer
ENTRYPOINT ["ampx"]
CMD ["doctor"]
