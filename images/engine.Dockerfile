# The engine image: prefill and decode, with torch and NIXL. As images/control.Dockerfile, where not marked otherwise.
#
#   docker build -f images/engine.Dockerfile [--build-arg BASE=IMAGE] [--build-arg CA_BUNDLE=FILE] .
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS tools
ARG CA_BUNDLE=images/no-ca-bundle.pem
ARG UV_VERSION=0.13.9
COPY ${CA_BUNDLE} /tools/ca-bundle.pem
COPY images/with-ca.sh /tools/with-ca
RUN python3 -m venv /tools/uv && /tools/with-ca /tools/uv/bin/pip install --quiet --no-cache-dir uv==${UV_VERSION}

# What to install, with hashes. A stage of its own: the layer after it depends on these lines, not on pyproject.toml.
FROM tools AS wanted
COPY pyproject.toml uv.lock /source/
RUN cd /source && /tools/uv/bin/uv export --quiet --frozen --no-emit-project --no-annotate --no-header \
    --extra engine --extra trace > /wanted.txt

FROM tools AS dependencies
COPY --from=wanted /wanted.txt /wanted.txt
RUN python3 -m venv --without-pip /opt/sluice && PYC_INVALIDATION_MODE=UNCHECKED_HASH /tools/with-ca \
    /tools/uv/bin/uv pip sync --python /opt/sluice/bin/python --require-hashes --compile-bytecode --no-cache /wanted.txt \
    && rm /opt/sluice/.lock

FROM tools AS code
COPY . /source
RUN cd /source && /tools/with-ca /tools/uv/bin/uv build --quiet --no-cache --wheel --out-dir /wheel \
    && python3 -m venv --without-pip /opt/sluice && PYC_INVALIDATION_MODE=UNCHECKED_HASH \
    /tools/uv/bin/uv pip install --python /opt/sluice/bin/python --no-deps --compile-bytecode --no-cache /wheel/*.whl \
    && ln -s "$(cd /opt/sluice && echo lib/python3*)/site-packages/sluice_cli/models" /opt/sluice/models \
    && mkdir /code && cd / && tar -c opt/sluice/lib/python3*/site-packages/sluice_* opt/sluice/bin/sluice \
    opt/sluice/models | tar -x -C /code

FROM ${BASE}
# First, and large: nothing but the lock changes what lies below it.
COPY --from=dependencies /opt/sluice /opt/sluice
# No module is looked for in the folder a process starts in, which others may write to.
ENV PATH=/opt/sluice/bin:/usr/local/bin:/usr/bin:/bin HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    PYTHONSAFEPATH=1
RUN echo 'sluice:x:65532:65532:sluice:/tmp:/usr/sbin/nologin' >> /etc/passwd && echo 'sluice:x:65532:' >> /etc/group
COPY --from=code /code /
USER 65532:65532
WORKDIR /tmp
CMD ["python", "-m", "sluice_prefill", "--help"]
# Last: they make no layer, and change with every build.
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="sluice-engine" \
      org.opencontainers.image.description="Prefill and decode engines of Sluice" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
