"""Whether a schema only grew: what v1alpha1 promises to everybody who has stored an object."""

from __future__ import annotations

# What a change of which makes stored objects invalid or mean something else. (key, is it looser when larger)
_BOUNDS = (("maximum", True), ("minimum", False), ("maxLength", True), ("minLength", False), ("maxItems", True),
           ("maxProperties", True))  # fmt: skip
# What says nothing of what an object may be, or is looked at by itself.
_OTHER = {"description", "default", "enum", "required", "properties", "items", "additionalProperties",
          "x-kubernetes-validations"}  # fmt: skip
_SAME = ("type", "pattern", "format", "x-kubernetes-list-type", "x-kubernetes-list-map-keys",
         "x-kubernetes-preserve-unknown-fields")  # fmt: skip


def broken_promises(old, new, path=""):
    """What `new` takes away from `old`, as sentences; none if it only grew."""
    for key in sorted((old.keys() | new.keys()) - {*_SAME, *_OTHER, *(name for name, _ in _BOUNDS)}):
        yield f"{path}: nobody has said whether {key} may change; tell tests/support/operator_growth.py"
    for key in _SAME:
        if old.get(key) != new.get(key):
            yield f"{path}: {key} was {old.get(key)!r}, is {new.get(key)!r}"
    was, is_now = old.get("default"), new.get("default")
    # An object's default has its members' in it, and those may become more.
    if was != is_now and not (isinstance(was, dict) and isinstance(is_now, dict) and was.items() <= is_now.items()):
        yield f"{path}: default was {was!r}, is {is_now!r}"
    for key, larger_is_looser in _BOUNDS:
        if is_tighter(old.get(key), new.get(key), larger_is_looser):
            yield f"{path}: {key} was {old.get(key)}, is {new.get(key)}"
    for value in old.get("enum", ()):
        if value not in new.get("enum", old["enum"]):
            yield f"{path}: {value!r} is no value any more"
    if "enum" in new and "enum" not in old:
        yield f"{path}: has an enum now"
    for name in set(new.get("required", ())) - set(old.get("required", ())):
        yield f"{path}.{name}: is required now"
    rules = {rule["rule"] for rule in old.get("x-kubernetes-validations", ())}
    for rule in new.get("x-kubernetes-validations", ()):
        if rule["rule"] not in rules:
            yield f"{path}: has a new rule: {rule['rule']}"
    for name, member in old.get("properties", {}).items():
        if name in new.get("properties", {}):
            yield from broken_promises(member, new["properties"][name], f"{path}.{name}")
        else:
            yield f"{path}.{name}: is gone"
    for key in ("items", "additionalProperties"):
        if (key in old) is not (key in new):
            yield f"{path}: {key} came or went"
        elif key in old:
            yield from broken_promises(old[key], new[key], f"{path}[]")


def broken_definition(old, new):
    """The same for whole CRDs."""
    for key in ("group", "scope", "names"):
        if old["spec"][key] != new["spec"][key]:
            yield f"spec.{key} was {old['spec'][key]!r}, is {new['spec'][key]!r}"
    versions = {version["name"]: version for version in new["spec"]["versions"]}
    for was in old["spec"]["versions"]:
        name = was["name"]
        version = versions.get(name)
        if version is None or not version["served"]:
            yield f"{name}: is not served any more"
            continue
        if was["subresources"] != version["subresources"]:
            yield f"{name}: subresources were {was['subresources']}, are {version['subresources']}"
        yield from broken_promises(was["schema"]["openAPIV3Schema"], version["schema"]["openAPIV3Schema"], name)


def is_tighter(old, new, larger_is_looser):
    if old == new or new is None:
        return False
    if old is None:
        return True
    return new < old if larger_is_looser else new > old
