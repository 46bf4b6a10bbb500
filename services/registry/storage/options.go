package storage

import (
	"fmt"
	"net"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/runtime"
	serveroptions "k8s.io/apiserver/pkg/server/options"
	"k8s.io/apiserver/pkg/storage/etcd3"
	"k8s.io/apiserver/pkg/storage/storagebackend"

	"watershed.dev/platform/egress"
)

// Options hold the flags of etcd and of encryption at rest, with kube-apiserver's names.
type Options struct {
	Servers []string
	// Overrides name the etcd servers of some resources (group/resource#server;server).
	Overrides                 []string
	CertFile, KeyFile, CAFile string
	Prefix                    string
	CompactionInterval        time.Duration
	DefaultStorageMediaType   string
	// EncryptionProviderConfig is the path of an EncryptionConfiguration (apiserver.config.k8s.io/v1). Empty: no
	// encryption.
	EncryptionProviderConfig  string
	EncryptionAutomaticReload bool
	DeleteCollectionWorkers   int
	GarbageCollection         bool
	LeaseReuseSeconds         int64
	CountPollPeriod           time.Duration
	DBSizePollInterval        time.Duration
}

// AddFlags registers the flags --etcd-*, --storage-media-type and --encryption-provider-config* with their defaults.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	fs.StringSliceVar(&o.Servers, "etcd-servers", o.Servers,
		"etcd's client URLs (scheme://ip:port, or unix://path), comma separated.")
	fs.StringSliceVar(&o.Overrides, "etcd-servers-overrides", o.Overrides,
		"Per-resource etcd servers overrides, comma separated. The format of an override is group/resource#servers; "+
			"the servers are URLs, semicolon separated. It applies to built-in resources only.")
	fs.StringVar(&o.CertFile, "etcd-certfile", o.CertFile, "SSL certification file used to secure etcd communication.")
	fs.StringVar(&o.KeyFile, "etcd-keyfile", o.KeyFile, "SSL key file used to secure etcd communication.")
	fs.StringVar(&o.CAFile, "etcd-cafile", o.CAFile,
		"SSL Certificate Authority file used to secure etcd communication.")
	fs.StringVar(&o.Prefix, "etcd-prefix", "/registry", "The prefix to prepend to all resource paths in etcd.")
	fs.DurationVar(&o.CompactionInterval, "etcd-compaction-interval", 5*time.Minute,
		"The interval of compaction requests. If 0, the compaction request from the registry is disabled.")
	fs.StringVar(&o.DefaultStorageMediaType, "storage-media-type", runtime.ContentTypeProtobuf,
		"The media type to use to store objects in storage.")
	fs.StringVar(&o.EncryptionProviderConfig, "encryption-provider-config", "",
		"The file containing configuration for encryption providers to be used for storing secrets in etcd.")
	fs.BoolVar(&o.EncryptionAutomaticReload, "encryption-provider-config-automatic-reload", false,
		"Determines if the file set by --encryption-provider-config should be automatically reloaded if the disk "+
			"contents change.")
	fs.IntVar(&o.DeleteCollectionWorkers, "delete-collection-workers", 1,
		"Number of workers spawned for a DeleteCollection call.")
	fs.BoolVar(&o.GarbageCollection, "enable-garbage-collector", true,
		"Enables the generic garbage collector. It must have the value of the corresponding flag of "+
			"kube-controller-manager.")
	fs.Int64Var(&o.LeaseReuseSeconds, "lease-reuse-duration-seconds",
		etcd3.NewDefaultLeaseManagerConfig().ReuseDurationSeconds,
		"The time in seconds that each etcd lease is reused.")
	fs.DurationVar(&o.CountPollPeriod, "etcd-count-metric-poll-period", time.Minute,
		"Frequency of polling etcd for the number of objects of each resource. 0 disables the metric.")
	fs.DurationVar(&o.DBSizePollInterval, "etcd-db-metric-poll-interval", storagebackend.DefaultDBMetricPollInterval,
		"The interval of requests to poll etcd for its size.")
}

// Validate returns an error that names the invalid flag.
func (o *Options) Validate() error {
	for _, server := range o.Servers {
		if !isEtcdURL(server) {
			return fmt.Errorf("--etcd-servers %q: want http://host:port, https://host:port or unix://path", server)
		}
	}
	return o.validateOverrides()
}

// isEtcdURL reports if etcd's client can dial a server. It accepts host:port as http, as kube-apiserver does.
func isEtcdURL(server string) bool {
	if _, _, err := net.SplitHostPort(server); err == nil && !strings.Contains(server, "/") {
		return true
	}
	u, err := url.Parse(server)
	return err == nil && (u.Host+u.Path) != "" && slices.Contains([]string{"http", "https", "unix", "unixs"}, u.Scheme)
}

// upstream returns the options in the form of upstream's storage packages. Their allocators open clients of their own,
// through out.
func (o *Options) upstream(out egress.Selector) *serveroptions.EtcdOptions {
	eo := serveroptions.NewEtcdOptions(storagebackend.NewDefaultConfig(o.Prefix, nil))
	to := &eo.StorageConfig.Transport
	if out.Etcd() != nil {
		to.EgressLookup = out.Lookup()
	}
	to.ServerList, to.CertFile, to.KeyFile, to.TrustedCAFile = o.Servers, o.CertFile, o.KeyFile, o.CAFile
	eo.StorageConfig.CompactionInterval = 0 // the publisher compacts, because upstream's compactor holds a watch
	eo.StorageConfig.LeaseManagerConfig.ReuseDurationSeconds = o.LeaseReuseSeconds
	eo.StorageConfig.DBMetricPollInterval = o.DBSizePollInterval
	eo.EtcdServersOverrides = o.Overrides
	eo.DefaultStorageMediaType = o.DefaultStorageMediaType
	eo.EnableWatchCache = false
	return eo
}
