package harness

import (
	"errors"
	"os"
	"path/filepath"
	"strings"

	"github.com/nats-io/nats.go/jetstream"
	"go.etcd.io/etcd/client/pkg/v3/transport"
	"go.etcd.io/etcd/client/v3"
	"sigs.k8s.io/yaml"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/rpc"
)

// registryConfig is the part of registry's configuration for its connections to etcd and NATS.
type registryConfig struct {
	Servers string `json:"etcd-servers"`
	CA      string `json:"etcd-cafile"`
	Cert    string `json:"etcd-certfile"`
	Key     string `json:"etcd-keyfile"`
	NATS    string `json:"nats-url"`
}

// readRegistry reads the configuration of a registry of `split` in a data directory, in any placement.
func readRegistry(data string) (c registryConfig, err error) {
	text, err := os.ReadFile(filepath.Join(data, "config", "registry-0.yaml"))
	if errors.Is(err, os.ErrNotExist) {
		text, err = os.ReadFile(filepath.Join(data, "config", "front-0.yaml"))
	}
	if err == nil {
		err = yaml.Unmarshal(text, &c)
	}
	return c, err
}

// RegistryEtcd returns the configuration of a client of etcd, as registry connects to it.
func RegistryEtcd(data string) (clientv3.Config, error) {
	c, err := readRegistry(data)
	if err != nil {
		return clientv3.Config{}, err
	}
	tls, err := transport.TLSInfo{TrustedCAFile: c.CA, CertFile: c.Cert, KeyFile: c.Key}.ClientConfig()
	return clientv3.Config{Endpoints: strings.Split(c.Servers, ","), TLS: tls}, err
}

// RegistryJetStream connects to the NATS servers of `split`, as registry does. The caller closes the connection.
func RegistryJetStream(data string) (jetstream.JetStream, error) {
	c, err := readRegistry(data)
	if err != nil {
		return nil, err
	}
	id := filepath.Join(data, "pki", "inner-registry")
	nc, err := (&eventlog.Options{URL: c.NATS}).Connect("registry", rpc.TLS{CertFile: id + ".crt", KeyFile: id + ".key",
		CAFile: filepath.Join(data, "pki", "inner-ca.crt")})
	if err != nil {
		return nil, err
	}
	return jetstream.New(nc)
}
