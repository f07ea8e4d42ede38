# manualpar in an environment that also has what `make test` needs.
#
#     docker build --tag manualpar .                           # jax for the CPU
#     docker build --tag manualpar --build-arg EXTRA=cuda12 .  # or cuda13, or tpu
#     docker run manualpar train dp
#     docker run --entrypoint make manualpar test
#
# With Python 3.11 on x86-64 the image has the versions of constraints/ci.txt.

ARG PYTHON=3.11
FROM python:${PYTHON}-slim-bookworm

RUN apt-get update \
    && apt-get install --yes --no-install-recommends git make tini \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1000 manualpar
USER 1000
ENV PIP_NO_CACHE_DIR=1 VENV=/home/manualpar/venv
ENV PATH=${VENV}/bin:${PATH}
RUN mkdir /home/manualpar/repository
WORKDIR /home/manualpar/repository

# These files decide which packages are installed. If others change, this layer stays in the cache.
COPY --chown=1000:1000 .ci/install .ci/
COPY --chown=1000:1000 constraints/ constraints/
COPY --chown=1000:1000 LICENSE pyproject.toml setup.cfg setup.py ./
COPY --chown=1000:1000 configs/ configs/
COPY --chown=1000:1000 manualpar/__init__.py manualpar/
RUN .ci/install python3 "${VENV}"
ARG EXTRA=""
RUN if [ -n "${EXTRA}" ]; then \
      pip install --quiet --no-build-isolation --editable ".[${EXTRA}]"; \
    fi

# The stamps tell make that the environment is complete.
COPY --chown=1000:1000 . .
RUN touch "${VENV}/installed" "${VENV}/installed-to-train"

# As process 1, Python would ignore SIGTERM until the run handles it.
ENTRYPOINT ["tini", "--", "manualpar"]
CMD ["--help"]
