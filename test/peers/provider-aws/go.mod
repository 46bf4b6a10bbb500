module watershed.dev/test/peers/provider-aws

go 1.26.0

require github.com/upbound/provider-aws v1.23.0
