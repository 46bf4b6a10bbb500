package harness

import (
	"os"
	"path/filepath"
	"strings"

	"go.etcd.io/etcd/client/pkg/v3/transport"
	"go.etcd.io/etcd/client/v3"
	"sigs.k8s.io/yaml"
)

// RegistryEtcd returns the configuration of a client of etcd with the identity of registry, for the data directory of
// `split` in any placement.
func RegistryEtcd(data string) (clientv3.Config, error) {
	text, err := os.ReadFile(filepath.Join(data, "config", "registry-0.yaml"))
	if os.IsNotExist(err) {
		text, err = os.ReadFile(filepath.Join(data, "config", "front-0.yaml"))
	}
	var c struct {
		Servers string `json:"etcd-servers"`
		CA      string `json:"etcd-cafile"`
		Cert    string `json:"etcd-certfile"`
		Key     string `json:"etcd-keyfile"`
	}
	if err == nil {
		err = yaml.Unmarshal(text, &c)
	}
	if err != nil {
		return clientv3.Config{}, err
	}
	tls, err := transport.TLSInfo{TrustedCAFile: c.CA, CertFile: c.Cert, KeyFile: c.Key}.ClientConfig()
	return clientv3.Config{Endpoints: strings.Split(c.Servers, ","), TLS: tls}, err
}
