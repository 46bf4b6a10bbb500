module watershed.dev/test/envtest

go 1.26.0

require github.com/onsi/ginkgo/v2 v2.28.1

require github.com/Masterminds/semver/v3 v3.4.0 // indirect
