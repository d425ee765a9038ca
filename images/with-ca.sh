#!/bin/sh
# Run a command that trusts the bundle the build was given, if it was given one.
if [ -s /tools/ca-bundle.pem ]; then
  export SSL_CERT_FILE=/tools/ca-bundle.pem PIP_CERT=/tools/ca-bundle.pem
fi
exec "$@"
