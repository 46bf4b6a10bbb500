module watershed.dev/test/peers/provider-aws

go 1.26.0

// No package imports the module, so "go mod tidy" would drop it.
require github.com/upbound/provider-aws v1.23.0
