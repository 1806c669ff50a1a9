# lmkit serve on an NVIDIA GPU. From the root of the repository:
#   docker build -f deploy/docker/cuda.Dockerfile -t lmkit:cuda .
#   docker run --rm --gpus all -p 8000:8000 -e LMKIT_API_KEY --read-only --tmpfs /tmp:exec --cap-drop ALL -v models:/models lmkit:cuda
FROM python:3.11-slim-bookworm AS build
# torch brings the libraries of CUDA itself; the driver is the host's
ARG TORCH_INDEX=
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN python3 -m venv /opt/lmkit && /opt/lmkit/bin/pip install --no-cache-dir "flit_core>=3.11,<4" "setuptools>=77" wheel
RUN /opt/lmkit/bin/pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -c constraints.txt torch
RUN /opt/lmkit/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation -w /wheels \
    $(sed -n -e 's/\[.*//' -e 's/^-e //p' requirements.txt requirements-cuda.txt)
RUN /opt/lmkit/bin/pip install --no-cache-dir -c constraints.txt --find-links /wheels "lmkit-core[hub]" /wheels/*.whl
RUN /opt/lmkit/bin/lmkit plugins doctor

FROM python:3.11-slim-bookworm
# kernels in Triton are compiled when they are first used: below /tmp, which must therefore allow programs
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN groupadd --gid 10001 lmkit && useradd --uid 10001 --gid 10001 --home-dir /tmp --no-create-home lmkit \
    && install -d -o 10001 -g 10001 /models
COPY --from=build /opt/lmkit /opt/lmkit
# checkpoints are downloaded to /models; all else that is written goes to /tmp
ENV PATH=/opt/lmkit/bin:$PATH HF_HOME=/models HOME=/tmp PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /tmp
VOLUME /models
EXPOSE 8000
HEALTHCHECK --interval=10s --start-period=10m CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/ready', timeout=5)"]
STOPSIGNAL SIGTERM
# a public address: without LMKIT_API_KEY the server does not start
ENTRYPOINT ["lmkit", "serve", "--host", "0.0.0.0"]
