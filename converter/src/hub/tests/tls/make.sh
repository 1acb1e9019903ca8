#!/usr/bin/env bash
# Writes the test server's key and certificate and the authority that signed it. The authority's own
# key is thrown away. Good for a hundred years: tests know no clock.
set -euo pipefail
cd "$(dirname "$0")"
new=(openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 36500)
"${new[@]}" -x509 -subj "/CN=shardpack tests" -keyout authority.key -out authority.pem \
    -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign
"${new[@]}" -subj "/CN=127.0.0.1" -keyout server.key.pem -out server.csr
openssl x509 -req -in server.csr -CA authority.pem -CAkey authority.key -days 36500 -out server.pem \
    -extfile <(printf 'subjectAltName=IP:127.0.0.1\nbasicConstraints=CA:FALSE\n')
rm authority.key server.csr
