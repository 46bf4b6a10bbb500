package authn

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	apiserverconfig "k8s.io/apiserver/pkg/apis/apiserver"
	"k8s.io/client-go/rest"
	kubeoptions "k8s.io/kubernetes/pkg/kubeapiserver/options"

	"watershed.dev/platform/apiclient"
)

const configuration = `apiVersion: apiserver.config.k8s.io/v1
kind: AuthenticationConfiguration
anonymous: {enabled: %v}
jwt:
- issuer: {url: %q, audiences: [a]}
  claimMappings: {username: {claim: sub, prefix: ""}}
`

// The authentication configuration is reloaded when its file changes. An invalid configuration leaves the old one in
// force (S19).
func TestTheAuthenticationConfigurationIsReloaded(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(fmt.Sprintf(configuration, true, "https://first.example.com"))
	initial, err := (&kubeoptions.BuiltInAuthenticationOptions{AuthenticationConfigFile: file}).ToAuthenticationConfig()
	if err != nil {
		t.Fatal(err)
	}
	var inForce []string
	fails := false
	f := newConfigFile(file, &initial, &chain{
		updateJWT: func(_ context.Context, c *apiserverconfig.AuthenticationConfiguration) error {
			if fails {
				return fmt.Errorf("the issuer is unreachable")
			}
			inForce = append(inForce, c.JWT[0].Issuer.URL)
			return nil
		},
	})
	apply := func(text string, well bool, want int) {
		t.Helper()
		write(text)
		if err := f.reload(t.Context(), []byte(text)); (err == nil) != well {
			t.Errorf("%v", err)
		}
		if len(inForce) != want {
			t.Errorf("applied %v", inForce)
		}
	}
	apply(fmt.Sprintf(configuration, true, "https://second.example.com"), true, 1)
	apply("kind: Nonsense", false, 1)
	apply(fmt.Sprintf(configuration, true, "http://not.encrypted.example.com"), false, 1)
	apply(fmt.Sprintf(configuration, false, "https://third.example.com"), false,
		1) // the anonymous configuration cannot change at run time
	fails = true
	apply(fmt.Sprintf(configuration, true, "https://fourth.example.com"), false, 1)
	fails = false
	apply(fmt.Sprintf(configuration, true, "https://fourth.example.com"), true, 2)
}

// An issuer with an egress selector needs a configured egress; the error is kube-apiserver's.
func TestAnIssuersEgressHasToBeThere(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	c := NewConfig()
	c.Options.ServiceAccounts = nil
	c.Options.AuthenticationConfigFile = write("config.yaml", strings.ReplaceAll(fmt.Sprintf(configuration, true,
		"https://first.example.com"), "audiences: [a]", "audiences: [a], egressSelectorType: cluster"))
	const says = `oidc: egress lookup required with egress selector type "cluster"`
	if _, err := New(t.Context(), c, &apiclient.Conn{Config: &rest.Config{Host: "https://127.0.0.1:1"}}); err == nil ||
		!strings.Contains(err.Error(), says) {
		t.Errorf("%v, want %q", err, says)
	}
}
