// Package apiclient is the client with which services read the cluster: an ordinary client of the gateway, or of the
// gateway's handler in its process. Its informers have a known age. It does not access etcd or the event log directly.
//
// Cluster.Run owns the goroutines of the informers, and measures their age on its caller's goroutine.
package apiclient

import (
	"errors"
	"fmt"
	"net/http"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"watershed.dev/platform/identity"
	"watershed.dev/platform/kubeversion"
	"watershed.dev/platform/loopback"
	"watershed.dev/platform/version"
)

// resync is the resync period of informers, as in kube-apiserver.
const resync = 10 * time.Minute

// Gateway is the gateway in this process. Its clients share values by key (sync.Map).
type Gateway interface {
	http.Handler
	LoadOrStore(key, value any) (actual any, loaded bool)
}

// Conn configures a service's clients of the cluster.
type Conn struct {
	*rest.Config
	// gateway is nil if it is in another process.
	gateway Gateway
}

// Connect returns the configuration of a service's clients. They call the gateway of this process or, if gateway is
// nil, the gateway of the kubeconfig. They do not limit their requests, because the gateway does.
func Connect(gateway Gateway, kubeconfig, service string) (*Conn, error) {
	if gateway != nil {
		return &Conn{inProcess(gateway, service), gateway}, nil
	}
	c, err := Config(kubeconfig, service)
	return &Conn{Config: c}, err
}

// inProcess returns the configuration of clients that call the gateway's handler as the user of a service.
func inProcess(gateway http.Handler, service string) *rest.Config {
	c := loopback.ClientConfig(gateway, &user.DefaultInfo{
		Name:   identity.ServicePrefix + service,
		Groups: []string{identity.ServicesGroup, user.AllAuthenticated},
	})
	c.UserAgent = userAgent(service)
	return c
}

// Config returns the configuration of a service's clients of the gateway of a kubeconfig.
func Config(kubeconfig, service string) (*rest.Config, error) {
	if kubeconfig == "" {
		return nil, errors.New("--kubeconfig is required: " + service + " reads the cluster through the gateway")
	}
	c, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("--kubeconfig %q: %w", kubeconfig, err)
	}
	c.UserAgent = userAgent(service)
	c.QPS = -1
	c.Wrap(leaveDeadPeers)
	c.Wrap(retryRefused)
	return c, nil
}

// userAgent returns a service's user agent. The part before the slash is the manager in managedFields of its writes. It
// is kube-apiserver's.
func userAgent(service string) string {
	return fmt.Sprintf("kube-apiserver/%s watershed-%s/%s", kubeversion.Info().GitVersion, service, version.Release())
}

// Protobuf returns a copy of c for typed clients.
func Protobuf(c *rest.Config) *rest.Config {
	p := rest.CopyConfig(c)
	p.ContentType = "application/vnd.kubernetes.protobuf"
	return p
}

// Informers returns informers that drop managedFields, as kube-apiserver's own informers do, and the fields of pods and
// nodes that no service reads. strip removes further fields, which the calling service does not read.
func Informers(client kubernetes.Interface, strip ...func(obj any)) informers.SharedInformerFactory {
	return informers.NewSharedInformerFactoryWithOptions(client, resync,
		informers.WithTransform(func(obj any) (any, error) {
			if m, err := meta.Accessor(obj); err == nil && m.GetManagedFields() != nil {
				m.SetManagedFields(nil)
			}
			trim(obj)
			for _, s := range strip {
				s(obj)
			}
			return obj, nil
		}))
}
