package harness

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/rpc"
)

// RegistryJetStream connects to the NATS servers of `split` in a data directory, as registry does. The caller closes
// the connection.
func RegistryJetStream(data string) (jetstream.JetStream, error) {
	text, err := os.ReadFile(filepath.Join(data, "config", "registry-0.yaml"))
	if err != nil {
		return nil, err
	}
	var o eventlog.Options
	for line := range strings.Lines(string(text)) {
		if url, ok := strings.CutPrefix(strings.TrimSpace(line), "nats-url:"); ok {
			o.URL = strings.Trim(strings.TrimSpace(url), `"`)
		}
	}
	if o.URL == "" {
		return nil, fmt.Errorf("the configuration of registry has no nats-url: %s", text)
	}
	id := filepath.Join(data, "pki", "inner-registry")
	nc, err := o.Connect("registry", rpc.TLS{CertFile: id + ".crt", KeyFile: id + ".key",
		CAFile: filepath.Join(data, "pki", "inner-ca.crt")})
	if err != nil {
		return nil, err
	}
	return jetstream.New(nc)
}
