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

// Config returns the configuration of a service's client. The client calls the handler of the gateway in its process
// or, if gateway is nil, the gateway of the kubeconfig. It does not limit its requests, because the gateway does.
func Config(gateway http.Handler, kubeconfig, service string) (*rest.Config, error) {
	if gateway != nil {
		c := loopback.ClientConfig(gateway, &user.DefaultInfo{
			Name:   identity.ServicePrefix + service,
			Groups: []string{identity.ServicesGroup, user.AllAuthenticated},
		})
		c.UserAgent = userAgent(service)
		return c, nil
	}
	if kubeconfig == "" {
		return nil, errors.New("--kubeconfig is required: " + service + " reads the cluster through the gateway")
	}
	c, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("--kubeconfig %q: %w", kubeconfig, err)
	}
	c.UserAgent = userAgent(service)
	c.QPS = -1
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

// Informers returns informers that drop managedFields, as kube-apiserver's own informers do. The services do not read
// managedFields, which are a large part of an object. strip removes further fields that a service does not read.
func Informers(client kubernetes.Interface, strip ...func(obj any)) informers.SharedInformerFactory {
	return informers.NewSharedInformerFactoryWithOptions(client, resync,
		informers.WithTransform(func(obj any) (any, error) {
			if m, err := meta.Accessor(obj); err == nil && m.GetManagedFields() != nil {
				m.SetManagedFields(nil)
			}
			for _, s := range strip {
				s(obj)
			}
			return obj, nil
		}))
}
