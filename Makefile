# Everything is built with Go alone; what else is needed is built from Go modules.
KUBERNETES := v1.36.3
RELEASE    := $(shell git describe --tags --always --dirty 2>/dev/null || echo development)
VERSION    := k8s.io/component-base/version
LDFLAGS    := -X $(VERSION).gitVersion=$(KUBERNETES) -X $(VERSION).gitMajor=1 -X $(VERSION).gitMinor=36 \
              -X $(VERSION).gitCommit=$(shell git rev-parse HEAD 2>/dev/null || echo unknown) -X $(VERSION).gitTreeState=clean \
              -X $(VERSION).buildDate=1970-01-01T00:00:00Z -X main.release=$(RELEASE)
BIN        := bin
MODULES    := platform proto services/gateway services/authn services/authz services/admission services/registry services/watchfanout cmd/watershed

.PHONY: build up split test unit e2e lint generate peers conformance bench clean

build: ## the one binary
	go build -ldflags "$(LDFLAGS)" -o $(BIN)/watershed ./cmd/watershed

up: build ## everything in one process, in .watershed/
	$(BIN)/watershed up --data-dir .watershed $(ARGS)

split: build ## every service as a process of its own, in .watershed/
	$(BIN)/watershed split --data-dir .watershed $(ARGS)

clean:
	rm -rf $(BIN)
