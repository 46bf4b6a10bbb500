package rpc

import "testing"

func TestAddressesAreReadAsTheyAreWritten(t *testing.T) {
	for address, want := range map[string]bool{
		"unix:/run/w/registry-0.rpc": true,
		"127.0.0.1:80":               true,
		"[::1]:80":                   true,
		"registry.watershed:8443":    true,
		"unix:run/w":                 false,
		"unix:":                      false,
		"unix:80":                    false,
		"unix:///run/w":              false,
		"unix:/run/../w":             false,
		"unix:/run/a,b":              false,
		"unix:/run/a%20b":            false,
		"unix:/run/a b":              false,
		"unix:/run/a\"b":             false,
		"unix:/run/a\u00a0b":         false,
		"unix:/run/a\x7fb":           false,
		"/run/w":                     false,
		"host":                       false,
		":80":                        false,
		"host:0":                     false,
		"host:65536":                 false,
		"host:http":                  false,
		"":                           false,
	} {
		a, err := ParseAddress(address)
		if (err == nil) != want || err == nil && a.String() != address {
			t.Errorf("%q: %+v, %v", address, a, err)
		}
	}
}
