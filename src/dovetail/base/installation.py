"""This installation: versions, processor, threads, memory, devices, and the packages that it declares. Works without torch."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

from dovetail.base.errors import DISTRIBUTION, install_command
from dovetail.base.memory import available_memory

FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8", "asimd", "sve", "bf16")


def examined(version: str) -> dict[str, Any]:
    """Return the versions, the machine and the packages as plain data."""
    return {
        "dovetail": version,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": {"name": _processor(), "features": _features()},
        "threads": _threads(),
        "memory": {"available_bytes": available_memory()},
        "devices": _devices(),
        "packages": _packages(None),
        "extras": {name: _packages(name) for name in ("plots", "lab", "data", "cluster", "eval", "serve", "grammar", "hf")},
    }


def text(report: dict[str, Any]) -> str:
    """Return the report for people; beside what `examined` returns, it says whether the kernel for few rows is used."""
    memory = report["memory"]["available_bytes"]
    threads = ", ".join(f"{name} {value}" for name, value in report["threads"].items() if value is not None)
    lines = [
        f"dovetail   {report['dovetail']} on Python {report['python']}, {report['system']}",
        f"processor  {report['processor']['name']}: {', '.join(report['processor']['features']) or 'no known features'}",
        f"threads    {threads}",
        f"memory     {'unknown' if memory is None else f'{memory / 2**30:.1f} GB available'}",
        f"devices    {', '.join(report['devices']) or 'none: torch cannot be imported'}",
        f"kernel     for weights of int8 and int4: {report['kernel']}",
        *([] if report["packages"] else [f"installed  no: there is no package {DISTRIBUTION}, so requirements are unknown"]),
        "",
        *(_line(package) for package in report["packages"]),
    ]
    for extra, packages in report["extras"].items():
        missing = [package for package in packages if not package["installed"]]
        remedy = f"   {install_command(extra)}" if missing else ""
        lines += [_line(package) + remedy for package in packages]
    return "\n".join(lines)


def _line(package: dict[str, Any]) -> str:
    return f"{'✓' if package['installed'] else '✗'} {package['name']} {package['installed'] or 'missing'} ({package['needed']})"


def _packages(extra: str | None) -> list[dict[str, Any]]:
    """Return the packages that the installation declares: the required ones, or those of an extra."""
    rows = []
    for line in _requirements():
        requirement, _, marker = line.partition(";")
        if marker.strip().replace('"', "'") == ("" if extra is None else f"extra == '{extra}'"):
            name = requirement.strip()
            for sign in "<>=!~ [":
                name = name.partition(sign)[0]
            rows.append({"name": name, "needed": requirement.strip(), "installed": _installed(name)})
    return rows


def _requirements() -> list[str]:
    try:
        return metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # run from its sources
        return []


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    return next((line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")), platform.machine())


def _features() -> list[str]:
    line = next((line for line in _cpuinfo() if line.startswith(("flags", "Features"))), "")
    flags = set(line.partition(":")[2].split())
    return [feature for feature in FEATURES if feature in flags]


def _cpuinfo() -> list[str]:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()
    except OSError:  # another operating system
        return []


def _threads() -> dict[str, int | str | None]:
    """Return how many processors and threads computations use."""
    threads: dict[str, int | str | None] = {"processors": os.cpu_count()}
    try:
        import torch

        threads["torch"] = torch.get_num_threads()
    except ImportError:
        threads["torch"] = None
    return threads | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")}


def _devices() -> list[str]:
    try:
        import torch
    except ImportError:
        return []
    found = ["cpu"]
    if torch.cuda.is_available():
        found += [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return [*found, "mps"] if torch.backends.mps.is_available() else found
