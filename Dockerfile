# The image that `invoke build` makes. Plain on purpose: docker with BuildKit, podman and buildah build it, and there is
# no "# syntax=" line, which would make BuildKit pull a frontend from a registry.
#
# BASE_IMAGE has no default: lockfiles/images.yaml names one by digest, or `invoke build` makes one from Debian packages.
ARG BASE_IMAGE
FROM ${BASE_IMAGE}

# What a registry's base lacks; empty for the base that is made here, which has it all. The compiler and Python's headers
# are needed at run time: Triton and Inductor compile.
ARG APT_PACKAGES=""
# hadolint ignore=DL3008
RUN if [ -n "${APT_PACKAGES}" ]; then \
      apt-get update -qq \
      && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends ${APT_PACKAGES} \
      && apt-get clean; \
    fi \
    # Lists, logs and caches hold times and would make two builds differ.
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/log/apt /var/log/*.log \
           /var/cache/ldconfig/aux-cache /var/cache/debconf/*-old

# PYTHONHASHSEED: some bytecode (sets, frozensets) depends on the order of hashes.
ENV PYTHONHASHSEED=0 \
    PYTHONDONTWRITEBYTECODE=1

# Only the locks, so that a change of our source leaves this layer, the 5 GB one, in the builder's cache.
COPY lockfiles/host.txt lockfiles/runtime.txt /tmp/locks/
# Two build secrets, so that neither ends in a layer: the CA bundle of a proxy that inspects TLS, and a file with
# variables such as UV_DEFAULT_INDEX for another package index. Without them the public index is used.
# --no-build: a package without a wheel would run its own code. The installer itself does not stay.
RUN --mount=type=secret,id=ca,target=/run/ca.crt \
    --mount=type=secret,id=packages,target=/run/packages.env \
    set -eu; \
    if [ -s /run/ca.crt ]; then export PIP_CERT=/run/ca.crt SSL_CERT_FILE=/run/ca.crt; fi; \
    if [ -s /run/packages.env ]; then set -a; . /run/packages.env; set +a; fi; \
    export UV_PYTHON_DOWNLOADS=never UV_NO_CACHE=1 UV_LINK_MODE=copy UV_HTTP_TIMEOUT=180; \
    python3 -m venv /opt/uv; \
    /opt/uv/bin/pip install -q --disable-pip-version-check --no-cache-dir --no-compile --require-hashes \
        -r /tmp/locks/host.txt; \
    /opt/uv/bin/uv venv --quiet --no-project --python /usr/bin/python3 /opt/dflash; \
    /opt/uv/bin/uv pip sync --quiet --require-hashes --no-build --python /opt/dflash/bin/python \
        /tmp/locks/runtime.txt; \
    rm -rf /opt/uv /tmp/locks ~/.cache /opt/dflash/.lock; \
    # Bytecode that is not checked against file times: those are rewritten for reproducible layers, and bytecode that
    # looks stale is compiled anew at every start, since the root is read-only. Files that are no valid Python (templates)
    # are passed over.
    find /usr/lib/python3* /opt/dflash -name __pycache__ -type d -prune -exec rm -rf {} +; \
    /opt/dflash/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash \
        "$(/opt/dflash/bin/python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" /opt/dflash/lib \
        > /dev/null 2>&1 || true

# Any uid may run it: the two places that are written to are open, like /tmp. They belong on volumes; there is no VOLUME
# line, since an anonymous volume would take a forgotten mount in silence and lose the cache with the container.
RUN install -d -m 1777 /cache /runs \
 && rm -f /etc/passwd- /etc/group- /etc/shadow- /etc/gshadow- /var/log/lastlog /var/log/faillog

# DFLASH_IN_IMAGE tells our tools that the locked packages are this Python's. HOME and USER: a uid without an entry in
# /etc/passwd has neither, and torch asks for the user's name (pytorch#140765). NVIDIA_DRIVER_CAPABILITIES: what the
# container toolkit mounts; compute for CUDA, utility for nvidia-smi, which doctor asks.
ENV PATH=/opt/dflash/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    DFLASH_IN_IMAGE=1 DFLASH_CACHE=/cache DFLASH_RUNS=/runs \
    HOME=/cache/home USER=dflash LOGNAME=dflash HF_HOME=/cache/huggingface \
    PYTHONUNBUFFERED=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

WORKDIR /srv/dflash
COPY dflash/ dflash/
COPY env/ env/
COPY pipeline/ pipeline/
COPY benchmarks/ benchmarks/
COPY configs/ configs/
COPY lockfiles/ lockfiles/
# image.json says what the image was made from; a plain `docker build .` has none, hence the pattern.
COPY LICENSE image.jso[n] ./

# Last, since they change with every commit and should not undo the layers above.
ARG COMMIT=""
ARG LOCK_SHA256=""
ARG TORCH_VERSION=""
LABEL org.opencontainers.image.title="dflash" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${COMMIT}" \
      dflash.lock.sha256="${LOCK_SHA256}" \
      dflash.torch="${TORCH_VERSION}"

# Overridden by --user; not root by default.
USER 10001:10001
STOPSIGNAL SIGTERM
# tini as PID 1 passes SIGTERM on and reaps what compilers leave behind.
ENTRYPOINT ["/usr/bin/tini", "--", "python", "-m", "env.entrypoint"]
CMD ["train", "--config", "configs/quickstart.yaml"]
