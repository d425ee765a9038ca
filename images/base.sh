#!/usr/bin/env bash
# The base image where no registry is in reach: Debian 12 with Python and nothing to compile with, by debootstrap.
#
#   images/base.sh [IMAGE]        docker image IMAGE (sluice-base:bookworm); needs debootstrap, docker and root
#
# The root file system is kept outside the tree (SLUICE_IMAGES_CACHE, ~/.cache/sluice-images) and made once: a minute.
set -euo pipefail
image=${1:-sluice-base:bookworm}
cache=${SLUICE_IMAGES_CACHE:-$HOME/.cache/sluice-images}
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
packages=ca-certificates,python3,python3-venv
archive=$cache/base-bookworm-$(printf '%s' "$packages" | sha256sum | cut -c1-12).tar

if ! command -v debootstrap >/dev/null || [ "$(id -u)" != 0 ]; then
  echo "images/base.sh needs debootstrap (apt-get install debootstrap) and root; or give make images a base from a registry: BASE=python:3.11-slim-bookworm" >&2
  exit 1
fi
if [ ! -f "$archive" ]; then
  mkdir -p "$cache"
  root=$(mktemp -d "$cache/root.XXXXXX")
  trap 'rm -rf --one-file-system "$root"' EXIT
  debootstrap --variant=minbase --include="$packages" bookworm "$root" "$mirror" >"$cache/debootstrap.log" \
    || { tail -5 "$cache/debootstrap.log" >&2; exit 1; }
  rm -rf "$root"/var/lib/apt/lists/* "$root"/var/cache/* "$root"/var/log/* "$root"/tmp/* \
    "$root"/usr/share/{doc,man,locale,info,lintian}/* "$root"/usr/lib/python3*/__pycache__
  # Of the machine that it was made on.
  rm -f "$root"/etc/{hostname,resolv.conf,machine-id}
  # Others look at what is there while this is written: a name of its own until it is whole.
  tar -C "$root" --numeric-owner --one-file-system --sort=name -cf "$archive.new" .
  mv "$archive.new" "$archive"
fi
docker import --change 'CMD ["python3"]' "$archive" "$image" >/dev/null
docker image inspect --format '{{index .RepoTags 0}} {{.Size}}' "$image"
