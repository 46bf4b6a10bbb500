package authn

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	apiserverconfig "k8s.io/apiserver/pkg/apis/apiserver"
	kubeoptions "k8s.io/kubernetes/pkg/kubeapiserver/options"
)

const configuration = `apiVersion: apiserver.config.k8s.io/v1
kind: AuthenticationConfiguration
anonymous: {enabled: %v}
jwt:
- issuer: {url: %q, audiences: [a]}
  claimMappings: {username: {claim: sub, prefix: ""}}
`

// The authentication configuration is read anew when its file changes; what is wrong with a new one leaves the old one
// in force (S19).
func TestTheAuthenticationConfigurationIsReadAnew(t *testing.T) {
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
				return fmt.Errorf("the issuer does not answer")
			}
			inForce = append(inForce, c.JWT[0].Issuer.URL)
			return nil
		},
	})
	apply := func(text string, well bool, want int) {
		t.Helper()
		write(text)
		if err := f.apply(t.Context(), []byte(text)); (err == nil) != well {
			t.Errorf("%v", err)
		}
		if len(inForce) != want {
			t.Errorf("in force came %v", inForce)
		}
	}
	apply(fmt.Sprintf(configuration, true, "https://second.example.com"), true, 1)
	apply("kind: Nonsense", false, 1)
	apply(fmt.Sprintf(configuration, true, "http://not.encrypted.example.com"), false, 1)
	apply(fmt.Sprintf(configuration, false, "https://third.example.com"), false,
		1) // who anonymous is does not change while it runs
	fails = true
	apply(fmt.Sprintf(configuration, true, "https://fourth.example.com"), false, 1)
	fails = false
	apply(fmt.Sprintf(configuration, true, "https://fourth.example.com"), true, 2)
}
