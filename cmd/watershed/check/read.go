package check

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"net/url"
	"slices"
	"time"

	"github.com/spf13/pflag"
	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"watershed.dev/cmd/watershed/inspect"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/pki"
	"watershed.dev/platform/process"
	"watershed.dev/services/registry/etcdstatus"
)

// Options select the installation.
type Options struct {
	inspect.Options
	// Etcd is an etcd to read directly; no servers: registries read etcd.
	Etcd inspect.Etcd
	// Deep makes the replicas of the watch tier compare their objects with etcd's.
	Deep bool
	// Pre selects the checks before an installation. Namespace and StorageClass are of an installation in a cluster.
	Pre                     bool
	Namespace, StorageClass string
}

// AddFlags adds every option to fs.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	o.Options.AddFlags(fs)
	o.Etcd.AddFlags(fs)
	fs.BoolVar(&o.Deep, "deep", false,
		"Makes each replica of the watch tier compare the keys and revisions of its objects, and some values, with "+
			"etcd's, for 40 s at most.")
	fs.BoolVar(&o.Pre, "pre", false,
		"Checks before an installation: this machine for `up` and `split`, with up's flags or --config, or the cluster of "+
			"--kubeconfig or --context for the manifests and the chart.")
	fs.StringVar(&o.Namespace, "namespace", "watershed", "With --pre and a cluster: the namespace of the installation.")
	fs.StringVar(&o.StorageClass, "storage-class", "",
		"With --pre and a cluster: the StorageClass of etcd's volumes. Empty: the default StorageClass.")
}

// Read reads everything that Find needs. An error means that the options are invalid.
func (o *Options) Read(ctx context.Context) (*Input, error) {
	in := &Input{Now: time.Now()}
	config, err := o.Config()
	if err != nil && o.ThroughGateway() {
		return nil, err
	}
	if len(o.Etcd.Servers) > 0 {
		if err := o.readEtcd(ctx, in); err != nil {
			return nil, err
		}
	}
	if in.Reports, in.ReportsError = o.Reports(ctx, process.Shallow); in.ReportsError == nil {
		if err := lifecycle.Sleep(ctx, Pause); err != nil {
			return nil, err
		}
		in.Later, _ = o.Reports(ctx, process.Shallow)
		if o.Deep {
			in.Deep, in.DeepError = o.Reports(ctx, process.Deep)
		}
	}
	if config == nil { // the data directory is not of this machine's cluster
		in.ClusterError = err
		return in, nil
	}
	in.Server = config.Host
	in.readServing(config)
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	in.Cluster, in.ClusterError = ReadCluster(ctx, client)
	return in, nil
}

// readEtcd reads the etcd of the flags.
func (o *Options) readEtcd(ctx context.Context, in *Input) error {
	conf, err := o.Etcd.Config()
	if err != nil {
		return err
	}
	client, err := clientv3.New(conf)
	if err != nil {
		return fmt.Errorf("--etcd-servers %v: %w", o.Etcd.Servers, err)
	}
	defer client.Close()
	in.Etcd = etcdstatus.Read(ctx, client, o.Etcd.Prefix+"/watershed/nothing")
	for flag, file := range map[string]string{"--etcd-certfile": o.Etcd.CertFile, "--etcd-cafile": o.Etcd.CAFile} {
		if file != "" {
			in.Certificates = append(in.Certificates, pki.Describe(flag, file)...)
		}
	}
	for _, server := range o.Etcd.Servers {
		if u, err := url.Parse(server); err == nil && u.Scheme == "https" {
			if certs := servingCertificates(u.Host, conf.TLS); len(certs) > 0 {
				in.Certificates = append(in.Certificates, pki.Of("etcd "+u.Host, certs[0]))
			}
		}
	}
	return nil
}

// readServing reads the certificates that the gateway presents, and the CA of the kubeconfig.
func (in *Input) readServing(config *rest.Config) {
	u, err := url.Parse(config.Host)
	if err != nil || u.Scheme != "https" {
		return
	}
	host := u.Host
	if u.Port() == "" {
		host = net.JoinHostPort(u.Hostname(), "443")
	}
	in.Serving = servingCertificates(host, nil)
	tlsConfig, err := rest.TLSConfigFor(config)
	if err == nil && tlsConfig != nil && !tlsConfig.InsecureSkipVerify {
		in.Roots = tlsConfig.RootCAs
	}
}

// servingCertificates returns the certificates that a server presents: its own, and then intermediate certificates.
// Nothing is sent to the server, so its certificate need not be valid.
func servingCertificates(host string, conf *tls.Config) (certs []*x509.Certificate) {
	if conf == nil {
		conf = &tls.Config{}
	}
	conf = conf.Clone()
	conf.InsecureSkipVerify = true
	conf.VerifyConnection = func(state tls.ConnectionState) error {
		certs = state.PeerCertificates
		return nil
	}
	c, err := tls.DialWithDialer(&net.Dialer{Timeout: dialTimeout}, "tcp", host, conf)
	if err == nil {
		c.Close()
	}
	return certs
}

const dialTimeout = 3 * time.Second

// sortFindings puts the findings of each check in the order of their levels, the highest first. The findings of a check
// are together.
func sortFindings(all []Finding) {
	order := map[string]int{}
	for i, f := range all {
		if _, ok := order[f.Check]; !ok {
			order[f.Check] = i
		}
	}
	slices.SortStableFunc(all, func(a, b Finding) int {
		return cmp.Or(cmp.Compare(order[a.Check], order[b.Check]), cmp.Compare(b.Level, a.Level))
	})
}
