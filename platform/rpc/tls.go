package rpc

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/spf13/pflag"

	"watershed.dev/platform/pki"
)

// TLS names the files of a service's identity on the inner network, and of the CA that signs all these identities.
type TLS struct {
	CertFile, KeyFile, CAFile string
}

// AddFlags adds the flags of a service's identity on the inner network.
func (t *TLS) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&t.CertFile, "rpc-cert-file", t.CertFile,
		"This service's certificate on the inner network; its common name is the service's name.")
	fs.StringVar(&t.KeyFile, "rpc-key-file", t.KeyFile, "The key of --rpc-cert-file.")
	fs.StringVar(&t.CAFile, "rpc-ca-file", t.CAFile,
		"The CA that signs every service's inner certificate. Not the cluster's client CA.")
}

// files loads the files that a TLS names, and loads a file again when it has changed on disk.
type files struct {
	own         *reloadedFile[*tls.Certificate]
	authorities *reloadedFile[*x509.CertPool]
}

func (t TLS) files() (*files, error) {
	for flag, v := range map[string]string{
		"rpc-cert-file": t.CertFile,
		"rpc-key-file":  t.KeyFile,
		"rpc-ca-file":   t.CAFile,
	} {
		if v == "" {
			return nil, fmt.Errorf("--%s is required: services use mutual TLS", flag)
		}
	}
	f := &files{
		own: &reloadedFile[*tls.Certificate]{file: t.CertFile, load: func() (*tls.Certificate, error) {
			c, err := tls.LoadX509KeyPair(t.CertFile, t.KeyFile)
			if err != nil {
				return nil, fmt.Errorf("--rpc-cert-file %q with --rpc-key-file %q: %w", t.CertFile, t.KeyFile, err)
			}
			return &c, nil
		}},
		authorities: &reloadedFile[*x509.CertPool]{file: t.CAFile, load: func() (*x509.CertPool, error) {
			return pki.ReadCertPool("rpc-ca-file", t.CAFile)
		}},
	}
	if _, err := f.own.get(); err != nil {
		return nil, err
	}
	_, err := f.authorities.get()
	return f, err
}

// ServicePlaceholder stands for the name of a service in the path of a file that each service of a process has.
const ServicePlaceholder = "{service}"

// Of returns the identity of a service: it replaces ServicePlaceholder in the paths.
func (t TLS) Of(service string) TLS {
	path := func(pattern string) string { return strings.ReplaceAll(pattern, ServicePlaceholder, service) }
	return TLS{CertFile: path(t.CertFile), KeyFile: path(t.KeyFile), CAFile: path(t.CAFile)}
}

// ServerConfig returns the configuration of a server that requires client certificates of the inner CA. The server
// loads the files again, also the CA's, when they have changed on disk.
func (t TLS) ServerConfig() (*tls.Config, error) {
	f, err := t.files()
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion:     tls.VersionTLS13,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return f.own.get() },
		ClientAuth:     tls.RequireAnyClientCert, // VerifyConnection verifies it by the current CA file
		VerifyConnection: func(state tls.ConnectionState) error {
			return f.verify(state, "", x509.ExtKeyUsageClientAuth)
		},
	}, nil
}

// serverConfig returns the configuration of a server of several services. A client names the service whose certificate
// it expects (SNI).
func serverConfig(ids map[string]TLS) (*tls.Config, error) {
	configs := map[string]*tls.Config{}
	for service, id := range ids {
		conf, err := id.ServerConfig()
		if err != nil {
			return nil, err
		}
		if len(ids) == 1 {
			return conf, nil
		}
		configs[service] = conf
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		GetConfigForClient: func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
			if conf := configs[hello.ServerName]; conf != nil {
				return conf, nil
			}
			return nil, fmt.Errorf("tls: service %q is not in this process", hello.ServerName)
		},
	}, nil
}

// ClientConfig returns the configuration of a client of the named server. The client loads the files again as a server
// does.
func (t TLS) ClientConfig(server string) (*tls.Config, error) {
	f, err := t.files()
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion:           tls.VersionTLS13,
		ServerName:           server,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return f.own.get() },
		InsecureSkipVerify:   true, // VerifyConnection verifies it by the current CA file
		VerifyConnection: func(state tls.ConnectionState) error {
			return f.verify(state, server, x509.ExtKeyUsageServerAuth)
		},
	}, nil
}

// verify checks a certificate as crypto/tls does with a fixed set of CAs. crypto/tls calls it for resumed connections
// too.
func (f *files) verify(state tls.ConnectionState, name string, usage x509.ExtKeyUsage) error {
	authorities, err := f.authorities.get()
	if err != nil {
		return err
	}
	if len(state.PeerCertificates) == 0 {
		return errors.New("tls: the peer shows no certificate")
	}
	intermediates := x509.NewCertPool()
	for _, c := range state.PeerCertificates[1:] {
		intermediates.AddCert(c)
	}
	_, err = state.PeerCertificates[0].Verify(x509.VerifyOptions{
		Roots:         authorities,
		Intermediates: intermediates,
		DNSName:       name,
		KeyUsages:     []x509.ExtKeyUsage{usage},
	})
	return err
}

// reloadedFile is the content of a file. get loads it again when the modification time has changed. If that fails, get
// returns the previous content.
type reloadedFile[T any] struct {
	file string
	load func() (T, error)

	mu      sync.Mutex
	modTime time.Time
	loaded  bool
	value   T
}

func (r *reloadedFile[T]) get() (T, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	info, err := os.Stat(r.file)
	if err == nil && (!r.loaded || !info.ModTime().Equal(r.modTime)) {
		var v T
		if v, err = r.load(); err == nil {
			r.value, r.modTime, r.loaded = v, info.ModTime(), true
		}
	}
	if r.loaded {
		return r.value, nil
	}
	return r.value, err
}
