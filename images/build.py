"""Build the images and say how large they are: of what they are made, how long it took, what a change of code moves.

  python images/build.py [--base IMAGE] [--ca-bundle FILE] [--prefix REPOSITORY/] [--tag TAG] [control] [engine]

`sluice-base:bookworm` as base is made by images/base.sh when it is not there. Docker with its legacy builder will do.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ("control", "engine")
OFFLINE_BASE = "sluice-base:bookworm"
# Where a bundle from elsewhere is put for the build: COPY sees nothing outside of the tree.
BUNDLE = ROOT / "images" / "ca-bundle.pem"
BUILD_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes. `code`: the layer that a change of ours replaces; `dependencies`: the one that changes with the lock."""

    image: int
    base: int
    dependencies: int
    code: int


def docker(*words: str) -> str:
    """stdout. Raises CalledProcessError."""
    return subprocess.run(["docker", *words], check=True, text=True, stdout=subprocess.PIPE, timeout=120).stdout


def sizes(image: str) -> Sizes:
    """Of an image that was built here. Raises CalledProcessError if there is none; ValueError for another's."""
    lines = docker(
        "history", "--no-trunc", "--human=false", "--format", "{{.Size}}\t{{.CreatedBy}}", image
    ).splitlines()
    steps = [(int(size), by) for size, _, by in (line.partition("\t") for line in lines)]
    copies = [index for index, (size, by) in enumerate(steps) if "COPY" in by and size]
    if len(copies) < 2:
        raise ValueError(f"{image} has no layers of dependencies and code: was it built by images/build.py?")
    code, dependencies = copies[:2]
    whole = sum(size for size, _ in steps)
    base = sum(size for size, _ in steps[dependencies + 1 :])
    return Sizes(whole, base, steps[dependencies][0], steps[code][0])


@contextlib.contextmanager
def bundle_in_tree(source: Path | None) -> Iterator[list[str]]:
    """Build arguments for a bundle from outside of the tree, which lies inside meanwhile."""
    if source is None:
        yield []
        return
    shutil.copyfile(source, BUNDLE)
    try:
        yield ["--build-arg", f"CA_BUNDLE={BUNDLE.relative_to(ROOT)}"]
    finally:
        BUNDLE.unlink()


def build(name: str, tag: str, base: str, arguments: list[str]) -> None:
    """Raises CalledProcessError; the builder's words are on stderr."""
    command = ["docker", "build", "--network", "host", "-f", f"images/{name}.Dockerfile", "-t", tag, *arguments]
    command += ["--build-arg", f"BASE={base}"] if base else []
    command += ["--build-arg", f"REVISION={revision()}", "."]
    # stdout is for the report.
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr, timeout=BUILD_TIMEOUT_S)


def revision() -> str:
    """Of the checkout, marked where something is not committed; "unknown" outside of one."""
    told = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    return told.stdout.strip() if told.returncode == 0 else "unknown"


def ensure_base(base: str) -> None:
    if base == OFFLINE_BASE and not docker("images", "--quiet", base).strip():
        subprocess.run([str(ROOT / "images" / "base.sh"), base], check=True, stdout=sys.stderr, timeout=BUILD_TIMEOUT_S)


def main() -> int:
    parser = argparse.ArgumentParser(description="Build Sluice's images")
    parser.add_argument("names", nargs="*", metavar="control|engine", help="default: both")
    parser.add_argument("--base", default="", help="default: the Dockerfiles' own; sluice-base:bookworm is made here")
    parser.add_argument("--ca-bundle", type=Path, help="certificates to trust while building (PEM)")
    parser.add_argument("--prefix", default="", help="of the images' names, e.g. registry.example/team/")
    parser.add_argument("--tag", default="dev")
    args = parser.parse_args()
    if unknown := set(args.names) - set(IMAGES):
        parser.error(f"no image {sorted(unknown)}: there are {', '.join(IMAGES)}")
    if args.ca_bundle is not None and not args.ca_bundle.is_file():
        parser.error(f"--ca-bundle: {args.ca_bundle} is no file")
    if shutil.which("docker") is None:
        parser.error("docker is not there: install it, or set PATH")
    try:
        ensure_base(args.base)
        with bundle_in_tree(args.ca_bundle) as arguments:
            for name in args.names or IMAGES:
                tag, began = f"{args.prefix}sluice-{name}:{args.tag}", time.monotonic()
                build(name, tag, args.base, arguments)
                print(f"{tag}: {time.monotonic() - began:.0f} s, {told(sizes(tag))}", flush=True)
    except subprocess.CalledProcessError as error:
        print(f"images: {' '.join(map(str, error.cmd[:4]))} ... ended with {error.returncode}", file=sys.stderr)
        return 1
    return 0


def told(of: Sizes) -> str:
    parts = {"image": of.image, "base": of.base, "dependencies": of.dependencies, "code": of.code}
    return ", ".join(f"{name} {size / 1e6:,.1f} MB" for name, size in parts.items())


if __name__ == "__main__":
    # The builder that every docker has; with BuildKit set, that one.
    os.environ.setdefault("DOCKER_BUILDKIT", "0")
    sys.exit(main())
