"""Says which packages a wheel has; everything else is in setup.cfg.

The folder `configs` of the repository is the package `manualpar.configs` of a wheel, so that
`manualpar train fsdp_lm` works without a copy of the repository.
"""

from setuptools import find_packages, setup

CONFIGS = "manualpar.configs"

setup(
    packages=[
        *find_packages(include=["manualpar", "manualpar.*"]),
        CONFIGS,
        *(f"{CONFIGS}.{name}" for name in find_packages("configs")),
    ],
    package_dir={CONFIGS: "configs"},
)
