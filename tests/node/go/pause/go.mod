module torchrec-cloud/tests/node/pause

go 1.25.0
