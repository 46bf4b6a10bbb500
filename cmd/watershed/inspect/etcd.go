package inspect

import (
	"fmt"

	"github.com/spf13/pflag"
	"go.etcd.io/etcd/client/pkg/v3/transport"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
)

// Etcd selects an etcd, with kube-apiserver's flags.
type Etcd struct {
	Servers                   []string
	CertFile, KeyFile, CAFile string
	Prefix                    string
}

// AddFlags adds every option to fs.
func (e *Etcd) AddFlags(fs *pflag.FlagSet) {
	fs.StringSliceVar(&e.Servers, "etcd-servers", nil,
		"etcd's client URLs (scheme://ip:port), comma separated, to read etcd also without registry.")
	fs.StringVar(&e.CertFile, "etcd-certfile", "", "SSL certification file used to secure etcd communication.")
	fs.StringVar(&e.KeyFile, "etcd-keyfile", "", "SSL key file used to secure etcd communication.")
	fs.StringVar(&e.CAFile, "etcd-cafile", "", "SSL Certificate Authority file used to secure etcd communication.")
	fs.StringVar(&e.Prefix, "etcd-prefix", "/registry", "The prefix to prepend to all resource paths in etcd.")
}

// Config returns the configuration of a client.
func (e *Etcd) Config() (clientv3.Config, error) {
	c := clientv3.Config{Endpoints: e.Servers, Logger: zap.NewNop()}
	if e.CertFile == "" && e.CAFile == "" {
		return c, nil
	}
	info := transport.TLSInfo{CertFile: e.CertFile, KeyFile: e.KeyFile, TrustedCAFile: e.CAFile}
	var err error
	if c.TLS, err = info.ClientConfig(); err != nil {
		return c, fmt.Errorf("--etcd-certfile %q, --etcd-keyfile %q, --etcd-cafile %q: %w", e.CertFile, e.KeyFile,
			e.CAFile, err)
	}
	return c, nil
}
