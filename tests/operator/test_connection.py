"""Kubeconfigs and what a pod finds in itself."""

from __future__ import annotations

import base64

import pytest
import yaml

from sluice_operator.live.connection import Connection, ConnectionInvalid, from_kubeconfig, from_pod


def kubeconfig(tmp_path, cluster, user):
    told = {
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"} | cluster}],
        "users": [{"name": "other", "user": {}}, {"name": "u", "user": user}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "ns"}}],
        "current-context": "x",
    }
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(told))
    return path


def test_certificates_come_from_data_or_from_files_beside_it(tmp_path):
    (tmp_path / "k.pem").write_text("KEY")
    encoded = base64.b64encode(b"CERT").decode()
    path = kubeconfig(tmp_path, {}, {"client-certificate-data": encoded, "client-key": "k.pem"})
    assert from_kubeconfig(path) == Connection("https://127.0.0.1:1", certificate="CERT", key="KEY", namespace="ns")


def test_a_token_file_is_read_each_time(tmp_path):
    (tmp_path / "token").write_text("one\n")
    connection = from_kubeconfig(kubeconfig(tmp_path, {}, {"tokenFile": str(tmp_path / "token")}))
    assert connection.bearer() == "one"
    (tmp_path / "token").write_text("two\n")
    assert connection.bearer() == "two"


def test_a_user_without_anything_is_refused_by_name(tmp_path):
    with pytest.raises(ConnectionInvalid, match="user 'u' has neither certificate nor token"):
        from_kubeconfig(kubeconfig(tmp_path, {}, {"exec": {"command": "aws"}}))


@pytest.mark.parametrize("text", ["", "[]", "a: b", "{", "current-context: x\ncontexts: []"])
def test_a_file_that_is_no_kubeconfig_is_named(tmp_path, text):
    path = tmp_path / "k"
    path.write_text(text)
    with pytest.raises(ConnectionInvalid, match=str(path)):
        from_kubeconfig(path)


def test_a_pod_has_what_it_needs_in_a_folder(tmp_path):
    for name in ("namespace", "ca.crt", "token"):
        (tmp_path / name).write_text(name)
    connection = from_pod("fd00::1", "443", tmp_path)
    assert (connection.server, connection.namespace) == ("https://[fd00::1]:443", "namespace")
    assert connection.bearer() == "token"


def test_outside_of_a_pod_it_says_so(tmp_path):
    with pytest.raises(ConnectionInvalid, match="this is no pod"):
        from_pod("", "")
    with pytest.raises(ConnectionInvalid, match="service account"):
        from_pod("10.0.0.1", "443", tmp_path)
