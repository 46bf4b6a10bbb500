# The parameters of a release: make does not expand them, and the shell reads them from the environment, in quotes.
override export VERSION   := $(value VERSION)
override export FROM      := $(value FROM)
override export KEY       := $(value KEY)
override export REGISTRY  := $(value REGISTRY)
override export PLATFORMS := $(value PLATFORMS)
override export PUSH      := $(value PUSH)
override export UNSIGNED  := $(value UNSIGNED)

# Go alone builds everything, also the servers that the tests compare with.
KUBERNETES := v1.36.3
RELEASE    := $(shell git describe --tags --always --dirty 2>/dev/null || echo development)
COMPONENT  := k8s.io/component-base/version
STAMP      := -X $(COMPONENT).gitVersion=$(KUBERNETES) -X $(COMPONENT).gitMajor=1 -X $(COMPONENT).gitMinor=36 \
              -X $(COMPONENT).gitCommit=$(shell git rev-parse HEAD 2>/dev/null || echo unknown) -X $(COMPONENT).gitTreeState=clean \
              -X $(COMPONENT).buildDate=1970-01-01T00:00:00Z
# The profiles and stack traces of Go need no symbol table and no DWARF.
STRIP      := -s -w
LDFLAGS    := $(STAMP) -X watershed.dev/platform/version.release=$(RELEASE)
# The tag of the images in deploy/k8s.
TAG        := $(shell sed -n 's/^appVersion: //p' deploy/k8s/chart/Chart.yaml)
BIN        := bin
PEERS      := .build/bin
MODULES    := proto platform services/authn services/authz services/admission services/registry services/watchfanout services/gateway cmd/certgen cmd/embedded cmd/xds cmd/watershed deploy/images

# Every binary is static and has no build path, so the build cache serves all, also the tests. Tests are not vetted
# twice: lint does it.
export CGO_ENABLED := 0
export GOFLAGS     := $(GOFLAGS) -trimpath -vet=off

# The race detector needs a C compiler; everything else here does without.
RACE       := $(shell command -v $${CC:-gcc} >/dev/null 2>&1 && echo -race)
RACE_CGO   := $(if $(RACE),CGO_ENABLED=1)

.PHONY: build up cluster split test check linter unit e2e e2e-longest e2e-packages e2e-envtest e2e-integration e2e-cmd generate contracts peers conformance integration test-cmd differential cost envtest node-peers images release manifests chart alerts e2e-cluster e2e-ha e2e-release demo-swap scale robustness robustness-broken robustness-controllers rules bench footprint kube-burner fuzz docs screenshots clean help

help: ## the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 20

build: ## bin/watershed, the one binary, and bin/kube-apiserver, a link to it
	go build -ldflags "$(STRIP) $(LDFLAGS)" -o $(BIN)/watershed ./cmd/watershed
	ln -sf watershed $(BIN)/kube-apiserver

up: build ## everything in one process, in .watershed/
	$(BIN)/watershed up --data-dir .watershed $(ARGS)

cluster: build $(addprefix $(PEERS)/,kubectl kube-controller-manager kube-scheduler kwok kwok-stages.yaml) ## up, with kube-controller-manager, kube-scheduler and nodes without containers
	$(BIN)/watershed up --with-controllers --data-dir .watershed $(ARGS)

split: build ## every service as a process of its own, in .watershed/
	$(BIN)/watershed split --data-dir .watershed $(ARGS)

test: lint unit e2e ## lint, unit and e2e, as CI

SINCE      ?= HEAD
LINT       := .build/bin/golangci-lint run --config .golangci.yml

check: linter ## in some minutes, for a change in a service: lint and unit tests of the modules that changed since SINCE=HEAD, and rules
	@changed=$$(git diff --name-only "$(SINCE)"; git ls-files --others --exclude-standard); \
	for m in $(MODULES) test; do \
	  echo "$$changed" | grep -q "^$$m/.*[.]go$$" || continue; \
	  echo "$$m: lint$$(test $$m = test || echo ' and unit tests')"; \
	  $(LINT) ./$$m/... && { test $$m = test || (cd $$m && go test ./...); } || exit 1; \
	done
	cd test && go test -count=1 ./rules

linter:
	cd proto/tools/lint && GOWORK=off go build -o ../../../.build/bin/golangci-lint github.com/golangci/golangci-lint/v2/cmd/golangci-lint

lint: linter ## formatting, vet, the linters of .golangci.yml, and buf lint and breaking
	@f=$$(gofmt -l proto platform services cmd deploy test); test -z "$$f" || { echo "$$f"; echo 'run gofmt -w on these'; exit 1; }
	@$(LINT) $(MODULES:%=./%/...) ./test/...
	cd proto && GOWORK=off go tool -modfile=tools/go.mod buf lint && GOWORK=off go tool -modfile=tools/go.mod buf breaking --against baseline.binpb

unit: ## unit tests, of concurrent packages with the race detector
	$(RACE_CGO) go test -timeout 30m $(RACE) ./platform/... ./services/watchfanout/... ./services/gateway/... ./services/authn/... ./services/authz/...
	go test -timeout 30m ./proto/... ./services/admission/... ./services/registry/... ./cmd/certgen/... ./cmd/embedded/... ./cmd/xds/... ./cmd/watershed/... ./deploy/images/...
	cd test/peers/helm && GOWORK=off go test .
	cd test && go test -count=1 ./rules && go test ./eventlog ./simulation && go test -count=1 -run EveryMistake ./robustness

# Tests of test/cmd that take a few seconds each, and the tools that they need.
SHORT_CMD  := kubectl_get kubectl_diff kubectl_server_side_apply
CMD_TOOLS  := command -v bash && command -v jq && command -v openssl && command -v curl && { command -v ss || command -v netstat; }

# make runs two of the targets e2e-* at a time, the longest first. unit runs the packages eventlog, rules and simulation.
# cost runs alone, because it measures CPU and memory. stalls runs a test again that fails while the machine stands still.
# A robustness test has another seed then, which could hide a fault.
e2e: build peers $(PEERS)/kubectl-convert ## real clients and controllers against both forms, and short forms of the long targets
	$(MAKE) --jobs=2 e2e-longest e2e-packages e2e-envtest e2e-integration e2e-cmd
	cd test && go run ./stalls -- -count=1 -timeout=30m ./cost

e2e-longest:
	cd test && go run ./stalls -- -count=1 -timeout=60m -parallel=3 ./e2e

e2e-packages:
	cd test && go run ./stalls -never watershed.dev/test/robustness -- -count=1 -timeout=45m -p=1 $$(go list ./... | grep -Ev '^watershed.dev/test/(cost|e2e|eventlog|rules|simulation)$$')

e2e-envtest:
	cd test/envtest && GOWORK=off go run . -reference=false -project controller-runtime -packages client,webhook

e2e-integration:
	cd test && go run ./integration -ldflags "$(STAMP)"

e2e-cmd:
	if { $(CMD_TOOLS); } >/dev/null; then cd test && go run ./cmd -server watershed -what "$(SHORT_CMD)"; else echo 'test-cmd is skipped: a tool is missing'; fi

# What the tests run against, each from its own module.
peers: $(addprefix $(PEERS)/,kubectl kube-apiserver kube-controller-manager kube-scheduler kubeadm kwok kwok-stages.yaml dex etcd etcdctl etcdutl sample-apiserver) ## real peers for the tests

$(PEERS)/kube-%: test/go.mod
	cd test && go build -ldflags "$(STRIP) $(STAMP)" -o ../$@ ./peers/kube-$*
$(PEERS)/kubectl $(PEERS)/kubectl-convert: test/go.mod
	cd test && go build -ldflags "$(STRIP) $(STAMP)" -o ../$@ k8s.io/kubernetes/cmd/$(@F)
$(PEERS)/kubeadm: test/go.mod
	cd test && go build -ldflags "$(STRIP) $(STAMP)" -o ../$@ k8s.io/kubernetes/cmd/kubeadm
# dex' releases are no versions of its module: the commit of v2.45.1.
$(PEERS)/dex: test/peers/dex/go.mod
	cd test/peers/dex && GOWORK=off go build -ldflags "$(STRIP)" -o ../../../$@ github.com/dexidp/dex/cmd/dex
# No rule needs the service discovery of clouds.
$(PEERS)/promtool: test/peers/promtool/go.mod
	cd test/peers/promtool && GOWORK=off go build -tags remove_all_sd -ldflags "$(STRIP)" -o ../../../$@ github.com/prometheus/prometheus/cmd/promtool
$(PEERS)/helm: test/peers/helm/go.mod
	cd test/peers/helm && GOWORK=off go build -ldflags "$(STRIP)" -o ../../../$@ helm.sh/helm/v4/cmd/helm
$(PEERS)/kube-burner: test/peers/kube-burner/go.mod
	cd test/peers/kube-burner && GOWORK=off go build -ldflags "$(STRIP)" -o ../../../$@ github.com/kube-burner/kube-burner/v2/cmd/kube-burner
$(PEERS)/kube-burner-workloads: test/peers/kube-burner/go.mod
	rm -rf $@ && cd test/peers/kube-burner && d=$$(GOWORK=off go list -m -f '{{.Dir}}' github.com/kube-burner/kube-burner/v2) && \
	  cp -r --no-preserve=mode $$d/examples/workloads ../../../$@
# The CRDs of a Crossplane provider. The module is downloaded, and nothing of it is built.
$(PEERS)/provider-aws-crds: test/peers/provider-aws/go.mod
	rm -rf $@ $@.new && cd test/peers/provider-aws && GOWORK=off go mod download github.com/upbound/provider-aws && \
	  d=$$(GOWORK=off go list -m -f '{{.Dir}}' github.com/upbound/provider-aws) && \
	  cp -r --no-preserve=mode $$d/package/crds ../../../$@.new && mv ../../../$@.new ../../../$@
$(PEERS)/sample-apiserver: test/go.mod
	cd test && go build -ldflags "$(STRIP)" -o ../$@ k8s.io/sample-apiserver
$(PEERS)/kwok: test/go.mod
	cd test && go build -ldflags "$(STRIP)" -o ../$@ sigs.k8s.io/kwok/cmd/kwok
# What kwok's nodes and pods do: kwok's own stages.
$(PEERS)/kwok-stages.yaml: test/go.mod | $(PEERS)/kwok
	cd test && d=$$(go list -m -f '{{.Dir}}' sigs.k8s.io/kwok)/kustomize/stage && for s in node/fast node/heartbeat-with-lease pod/fast; do \
	  for f in $$(ls $$d/$$s/*.yaml | grep -v kustomization); do echo ---; cat $$f; done; done > ../$@.new && test -s ../$@.new && mv ../$@.new ../$@
$(PEERS)/etcd: test/go.mod
	cd test && go build -ldflags "$(STRIP)" -o ../$@ go.etcd.io/etcd/server/v3
$(PEERS)/etcdctl: test/go.mod
	cd test && go build -ldflags "$(STRIP)" -o ../$@ go.etcd.io/etcd/etcdctl/v3
$(PEERS)/etcdutl: test/go.mod
	cd test && go build -ldflags "$(STRIP)" -o ../$@ go.etcd.io/etcd/etcdutl/v3
# What a real node is made of.
node-peers: $(addprefix $(PEERS)/,kubelet kube-proxy agnhost resource-consumer pause etcd sample-apiserver containerd containerd-shim-runc-v2 ctr)

$(PEERS)/kubelet: test/go.mod
	cd test && go build -ldflags "$(STRIP) $(STAMP)" -o ../$@ ./peers/kubelet
$(PEERS)/pause: test/go.mod
	cd test && go build -ldflags "$(STRIP)" -o ../$@ ./peers/pause
$(PEERS)/agnhost $(PEERS)/resource-consumer: test/go.mod
	cd test && go build -ldflags "$(STRIP)" -o ../$@ k8s.io/kubernetes/test/images/$(@F)
$(PEERS)/containerd $(PEERS)/containerd-shim-runc-v2 $(PEERS)/ctr: test/peers/containerd/go.mod
	cd test/peers/containerd && GOWORK=off go build -tags "no_btrfs no_devmapper no_zfs" -o ../../../$@ github.com/containerd/containerd/v2/cmd/$(@F)
$(PEERS)/coredns: test/peers/coredns/go.mod
	cd test/peers/coredns && GOWORK=off go build -ldflags "$(STRIP)" -o ../../../$@ .
$(PEERS)/jaeger: test/peers/jaeger/go.mod
	cd test/peers/jaeger && GOWORK=off go build -ldflags "$(STRIP)" -o ../../../$@ github.com/jaegertracing/jaeger/cmd/all-in-one
$(PEERS)/cert-manager: test/peers/cert-manager/go.mod
	cd test/peers/cert-manager && GOWORK=off go build -ldflags "$(STRIP)" -o ../../../$@ .
$(PEERS)/e2e.test: test/go.mod
	cd test && go test -c -ldflags "$(STAMP)" -o ../$@ k8s.io/kubernetes/test/e2e

images: ## images of every binary, tar files of OCI layouts in .build/images; LOAD=docker or LOAD=containerd loads them too
	go run ./deploy/images -tag $(TAG) -ldflags "$(LDFLAGS)" $(if $(LOAD),-load $(LOAD))

release: ## images, binaries, SBOMs, manifests, chart, notes and checksums in .build/release/VERSION: VERSION=v0.1.0; KEY=FILE signs them, REGISTRY=HOST/PATH names the images, and PUSH=1 pushes them
	@test -n "$$VERSION" || { echo 'make release: VERSION is missing: add VERSION=v0.1.0'; exit 1; }
	@go build -o .build/release-tool ./deploy/images
	@.build/release-tool -release "$$VERSION" -out ".build/release/$$VERSION" \
	  -platforms "$${PLATFORMS:-linux/amd64,linux/arm64}" -key "$$KEY" -registry "$${REGISTRY:-watershed.dev}" \
	  -push="$${PUSH:-0}" -unsigned="$${UNSIGNED:-0}" \
	  -ldflags "$(STAMP) -X watershed.dev/platform/version.release=$$VERSION"

manifests: $(PEERS)/kubectl ## deploy/k8s/rendered and deploy/monitoring/prometheusrule.yaml, which tests compare with their sources; TAG=v0.2.0 is another tag of the images
	@grep -rlE 'watershed.dev/[a-z]+:' deploy/k8s/base deploy/k8s/components deploy/k8s/chart/templates | xargs sed -i -E 's#(watershed.dev/[a-z]+):[0-9A-Za-z.-]+#\1:$(TAG)#'
	@sed -i -e 's/^version: .*/version: $(TAG:v%=%)/' -e 's/^appVersion: .*/appVersion: $(TAG)/' deploy/k8s/chart/Chart.yaml
	@for o in dev ha compact; do $(PEERS)/kubectl kustomize deploy/k8s/overlays/$$o > deploy/k8s/rendered/$$o.yaml || exit 1; done
	@cd deploy/monitoring && { printf '%s\n' '# `make manifests` writes this file from alerts.yaml.' \
	  'apiVersion: monitoring.coreos.com/v1' 'kind: PrometheusRule' 'metadata:' '  name: watershed' \
	  '  labels: {app.kubernetes.io/part-of: watershed}' 'spec:'; sed '/^#/d; s/^./  &/' alerts.yaml; } > prometheusrule.yaml

chart: $(PEERS)/helm ## helm lint and helm template of deploy/k8s/chart, and the comparison with the overlays
	$(PEERS)/helm lint --quiet deploy/k8s/chart
	@for o in dev ha compact; do $(PEERS)/helm template watershed deploy/k8s/chart --set overlay=$$o >/dev/null || exit 1; done
	cd test/peers/helm && GOWORK=off go test -count=1 .

alerts: $(PEERS)/promtool ## promtool's checks and unit tests of deploy/monitoring/alerts.yaml
	$(PEERS)/promtool check rules deploy/monitoring/alerts.yaml
	$(PEERS)/promtool test rules deploy/monitoring/alerts_test.yaml

# in_older runs a command in a work tree of the commit UPGRADE_FROM, if it is set.
UPGRADE_FROM ?=
in_older = $(if $(UPGRADE_FROM),rm -rf .build/from && git worktree prune && git worktree add --detach .build/from $(UPGRADE_FROM) && \
	  (cd .build/from && export GOWORK= && $(1)) && git worktree remove --force .build/from)

# The cluster begins with the images of UPGRADE_FROM and goes to this commit's; without one these are the same with
# another version in them.
e2e-cluster: build peers images $(addprefix $(PEERS)/,kubelet kube-proxy containerd containerd-shim-runc-v2 ctr pause coredns jaeger cert-manager) ## Watershed as workloads on this machine as a real node (as root); UPGRADE_FROM=COMMIT, ARGS="-placement compact -watchers 50"
	$(call in_older,rm -rf ../images-from && go run ./deploy/images -tag $(TAG) \
	  -ldflags "$(STAMP) -X watershed.dev/platform/version.release=$(UPGRADE_FROM)" && cp -r .build/images ../images-from)
	go run ./deploy/images -ldflags "$(LDFLAGS) -X watershed.dev/platform/version.release=next" -tag next -out .build/images-next \
	  -only gateway,registry,watchfanout,authn,authz,admission,xds,watershed
	cd test && go test -count=1 -timeout 30m -v -run Workloads ./cluster -cluster $(if $(UPGRADE_FROM),-images images-from) $(ARGS)

e2e-ha: build images $(addprefix $(PEERS)/,kubectl kube-controller-manager kube-scheduler kubelet kube-proxy containerd containerd-shim-runc-v2 ctr pause coredns) ## overlays/ha on three network namespaces of this machine as nodes, which are disconnected, drained and lose their power (as root)
	cd test && go test -count=1 -timeout 40m -v -run ThreeNodes ./cluster -ha $(ARGS)

e2e-release: build $(addprefix $(PEERS)/,kubelet kube-proxy containerd containerd-shim-runc-v2 ctr pause coredns helm) ## the chart of .build/release/VERSION on this machine as a real node (as root): VERSION=v0.2.0 and FROM=v0.1.0, after make release of both; ARGS="-chart-overlay compact" on three nodes
	cd test && go test -count=1 -timeout 20m -v -run ReleaseOnANode ./cluster \
	  -release "$(CURDIR)/.build/release/$$VERSION" $${FROM:+-release-from "$(CURDIR)/.build/release/$$FROM"} $(ARGS)

demo-swap: build peers $(addprefix $(PEERS)/,kubelet kube-proxy containerd containerd-shim-runc-v2 ctr pause) ## kube-apiserver of a cluster with a real node swapped for Watershed, and back, under load (as root)
	cd test && go test -count=1 -timeout 20m -v -run Swap ./cluster -swap $(ARGS)

scale: build ## the watch tier scaled from two replicas to six and back under 5,000 watches
	cd test && go test -count=1 -timeout 10m -v -run ScalesAlone ./cluster -scale $(ARGS)

conformance: build peers node-peers $(PEERS)/e2e.test ## the upstream suite, with this machine as a real node (as root), against kube-apiserver and Watershed; ARGS="-node kwok" needs no root, and ARGS="-specs other" runs the other specs of four SIGs
	cd test && go run ./conformance -out ../.build/conformance -node real $(ARGS)

# Packages of kubernetes' test/integration, or a list of the command.
PACKAGES ?= short

integration: build $(PEERS)/etcd ## Kubernetes' own test/integration against Watershed: a short list, or PACKAGES=apiserver/apply,auth or PACKAGES=all; ARGS="-reference -record"
	cd test && go run ./integration -ldflags "$(STAMP)" -packages $(PACKAGES) $(ARGS)

test-cmd: build $(addprefix $(PEERS)/,kubectl kubectl-convert kube-apiserver kube-controller-manager kubeadm etcd) ## Kubernetes' own test/cmd, kubectl's scripts, against kube-apiserver and bin/kube-apiserver; ARGS='-what "crd wait"' for some
	cd test && go run ./cmd $(ARGS)

differential: build peers ## the same 60,000 requests to kube-apiserver and to Watershed; every difference is named. ARGS="-seed N" for others
	cd test && go run ./differential $(ARGS)

rules: build $(addprefix $(PEERS)/,kubectl kube-apiserver etcd promtool) ## Prometheus' rules and alerts for kube-apiserver, such as kubernetes-mixin's, over scrapes of both; RULES=FILE
	cd test && go test -count=1 -v -run '^TestRulesGiveTheSameAnswers$$' ./e2e -rules $(abspath $(RULES))

cost: build $(addprefix $(PEERS)/,kubectl kube-apiserver etcd) ## the price of hostile requests at kube-apiserver and at Watershed; rewrites docs/benchmarks/cost.md's table. ARGS=-short: 20 shapes, `up` only
	cd test && go run ./cost $(ARGS)

envtest: build $(addprefix $(PEERS)/,kubectl kube-apiserver etcd) ## the suites of controller-runtime, Kueue and other projects against kube-apiserver and bin/kube-apiserver; ARGS="-project kueue -packages webhook/core" for some
	cd test/envtest && GOWORK=off go run . $(ARGS)

robustness: build $(addprefix $(PEERS)/,kube-apiserver kube-controller-manager) ## clients against the split form while 1,000 things go wrong, and a judge; ARGS="-seed N" repeats a run; UPGRADE_FROM=COMMIT mixes both versions
	$(call in_older,go build -ldflags "$(STAMP) -X watershed.dev/platform/version.release=$(UPGRADE_FROM)" -o ../older ./cmd/watershed)
	cd test && go run ./robustness -watershed ../$(BIN)/watershed $(if $(UPGRADE_FROM),-older ../.build/older) $(ARGS)

robustness-controllers: build $(addprefix $(PEERS)/,kube-apiserver kube-controller-manager kubectl etcd) ## kube-controller-manager on a tier that receives the log 5 s late creates no pod more than on kube-apiserver
	cd test && go test -count=1 -timeout 10m -v -run ControllersBehind ./e2e -lag 5s $(ARGS)

robustness-broken: build ## the same against a Watershed that is broken on purpose, in each way: its test and the judge have to find it, within 50 faults
	cd test && go run ./robustness -watershed ../$(BIN)/watershed -seed 7 -break all $(ARGS)

bench: build peers ## Watershed beside kube-apiserver; rewrites docs/benchmarks/performance.md's table. ROW="renew a Lease" measures that alone
	cd test && go run ./bench -bin ../$(PEERS) -watershed ../$(BIN)/watershed $(if $(ROW),-rows "$(ROW)") $(ARGS)

footprint: build $(addprefix $(PEERS)/,kube-apiserver etcd provider-aws-crds) ## memory of fresh servers beside kube-apiserver's, with pods, ConfigMaps, custom resources, watches and real CRDs; rewrites a table of docs/benchmarks/performance.md
	cd test && go run ./bench -bin ../$(PEERS) -watershed ../$(BIN)/watershed -footprint -crds ../$(PEERS)/provider-aws-crds $(if $(ROW),-rows "$(ROW)") $(ARGS)

RATE       ?= 100

kube-burner: build peers $(addprefix $(PEERS)/,kube-burner kube-burner-workloads) ## kube-burner's api-intensive and crd-scale against kube-apiserver and Watershed; rewrites docs/benchmarks/kube-burner.md. RATE=500 is another rate of requests
	cd test && go run ./bench -bin ../$(PEERS) -watershed ../$(BIN)/watershed -kube-burner $(RATE) $(ARGS)

FUZZ_TIME  ?= 1m

fuzz: ## each fuzz target for FUZZ_TIME (a minute)
	@for p in ./services/gateway/h2writer ./services/gateway/routing ./platform/watchcache/core ./platform/watchcache/query ./platform/watchcache/list ./platform/watchcache/logreader ./platform/frame ./platform/eventlog ./platform/rpc ./platform/deflate ./services/registry/storage ./cmd/embedded ./cmd/xds; do \
	  for f in $$(go test -list '^Fuzz' $$p | grep ^Fuzz); do echo "$$p $$f"; go test -run '^$$' -fuzz "^$$f$$" -fuzztime $(FUZZ_TIME) $$p || exit 1; done; done

contracts: ## takes the contracts as they are for what later ones must be compatible with
	cd proto && GOWORK=off go tool -modfile=tools/go.mod buf build --exclude-source-info -o baseline.binpb

screenshots: build $(addprefix $(PEERS)/,kubectl kube-controller-manager kube-scheduler kwok kwok-stages.yaml) ## the pictures of the console in docs/operators/console, with chromium
	cd test && go test -count=1 -run '^TestConsole$$' ./e2e -screenshots docs/operators/console

docs: ## the generated parts of docs/operators, from flags and metrics
	cd cmd/watershed && go test -count=1 -run TheConfigurationReference . -update
	cd test && go test -count=1 -run TheMetricsReference ./rules -update-metrics

generate: ## Go code from proto/
	cd proto && GOWORK=off go tool -modfile=tools/go.mod buf generate

clean:
	rm -rf $(BIN) .build
