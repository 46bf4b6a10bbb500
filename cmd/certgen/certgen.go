package certgen

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/clientcmd"

	"watershed.dev/platform/version"
)

// pkiSecret is the Secret that no pod mounts: it holds all files, including the keys of the CAs.
const pkiSecret = "watershed-pki"

// podSecrets maps the Secrets that pods mount to their files. Each has only the files that its process needs.
var podSecrets = map[string][]string{
	"watershed-gateway": {
		"ca.crt",
		"front-proxy-ca.crt",
		"inner-ca.crt",
		"inner-gateway.crt",
		"inner-gateway.key",
		"apiserver.crt",
		"apiserver.key",
		"front-proxy-client.crt",
		"front-proxy-client.key",
		"apiserver-kubelet-client.crt",
		"apiserver-kubelet-client.key",
	},
	"watershed-registry": {
		"ca.crt",
		"front-proxy-ca.crt",
		"inner-ca.crt",
		"inner-registry.crt",
		"inner-registry.key",
		"client-registry.crt",
		"client-registry.key",
		"registry.kubeconfig",
		"sa.key",
		"front-proxy-client.crt",
		"front-proxy-client.key",
		"apiserver-kubelet-client.crt",
		"apiserver-kubelet-client.key",
	},
	"watershed-authn": {"ca.crt", "front-proxy-ca.crt", "inner-ca.crt", "inner-authn.crt", "inner-authn.key", "sa.pub",
		"client-authn.crt", "client-authn.key", "authn.kubeconfig"},
	"watershed-authz": {"inner-ca.crt", "inner-authz.crt", "inner-authz.key", "client-authz.crt", "client-authz.key",
		"authz.kubeconfig"},
	"watershed-admission": {"inner-ca.crt", "inner-admission.crt", "inner-admission.key", "client-admission.crt",
		"client-admission.key", "admission.kubeconfig"},
	// the front of components/compact: gateway, authn, authz, admission and registry in a process
	"watershed-front": {
		"ca.crt",
		"front-proxy-ca.crt",
		"inner-ca.crt",
		"inner-gateway.crt",
		"inner-gateway.key",
		"inner-authn.crt",
		"inner-authn.key",
		"inner-authz.crt",
		"inner-authz.key",
		"inner-admission.crt",
		"inner-admission.key",
		"inner-registry.crt",
		"inner-registry.key",
		"apiserver.crt",
		"apiserver.key",
		"front-proxy-client.crt",
		"front-proxy-client.key",
		"apiserver-kubelet-client.crt",
		"apiserver-kubelet-client.key",
		"sa.key",
		"sa.pub",
	},
	"watershed-watchfanout": {"inner-ca.crt", "inner-watchfanout.crt", "inner-watchfanout.key"},
	"watershed-etcd":        {"inner-ca.crt", "inner-etcd.crt", "inner-etcd.key"},
	"watershed-nats":        {"inner-ca.crt", "inner-nats.crt", "inner-nats.key", "jetstream.key"},
	"watershed-xds":         {"inner-ca.crt", "inner-xds.crt", "inner-xds.key"},
	// for operators and controllers
	"watershed-admin": {"admin.kubeconfig", "ca.crt", "ca.key", "sa.key"},
}

// Config holds the settings of the command.
type Config struct {
	// Namespace is the namespace of the Secrets in the cluster of Kubeconfig. Empty Kubeconfig: the cluster that this
	// process runs in.
	Namespace, Kubeconfig string
	// ImportDir holds an existing PKI to import, such as kubeadm's. Empty: all files are created.
	ImportDir string
	// MountPath is the directory at which pods mount their Secret.
	MountPath string
	// Hosts holds additional names and addresses of the gateway's certificate. admin.kubeconfig uses the first.
	Hosts []string
	// Port is the port at which clients reach the gateway.
	Port int
}

// AddFlags registers the command's flags with their defaults.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&c.Namespace, "namespace", "", "The namespace of the Secrets.")
	fs.StringVar(&c.Kubeconfig, "kubeconfig", "", "The cluster of the Secrets. Empty: the cluster of this pod.")
	fs.StringVar(&c.ImportDir, "import-dir", "",
		"A directory with a PKI to import, with kubeadm's file names: ca.crt, ca.key, sa.key, sa.pub, "+
			"front-proxy-ca.crt and so on. It is ignored once the Secrets exist.")
	fs.StringVar(&c.MountPath, "mount-path", "/etc/watershed/pki", "The directory at which pods mount their Secret.")
	fs.StringSliceVar(&c.Hosts, "tls-sans", nil,
		"Additional names and addresses of the gateway's certificate. admin.kubeconfig uses the first.")
	fs.IntVar(&c.Port, "secure-port", 443, "The port at which clients reach the gateway.")
}

// Command creates the missing files in the Secrets of a namespace, and renews old certificates. It may run repeatedly,
// and concurrently with itself.
func Command(fs *pflag.FlagSet) func() error {
	c := &Config{}
	c.AddFlags(fs)
	return c.command
}

func (c *Config) command() error {
	if c.Namespace == "" {
		return errors.New("--namespace is required")
	}
	conf, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig)
	if err != nil {
		return fmt.Errorf("--kubeconfig %q: %w", c.Kubeconfig, err)
	}
	conf.UserAgent = "watershed-certgen/" + version.Release()
	client, err := kubernetes.NewForConfig(conf)
	if err != nil {
		return fmt.Errorf("--kubeconfig %q: %w", c.Kubeconfig, err)
	}
	changed, err := c.Run(context.Background(), client.CoreV1().Secrets(c.Namespace))
	if err != nil {
		return err
	}
	if len(changed) == 0 {
		fmt.Println("All certificates and keys exist and are young enough.")
	}
	for _, name := range changed {
		fmt.Println("secret/" + name + " written")
	}
	return nil
}

// maxAttempts bounds the attempts of Run after conflicts with another writer.
const maxAttempts = 10

// Run creates the missing files, and returns the names of the Secrets that it wrote.
func (c *Config) Run(ctx context.Context, secrets typedcorev1.SecretInterface) (changed []string, err error) {
	for range maxAttempts {
		var wrote []string
		wrote, err = c.attempt(ctx, secrets)
		changed = append(changed, wrote...)
		if !apierrors.IsConflict(err) && !apierrors.IsAlreadyExists(err) {
			break
		}
	}
	slices.Sort(changed)
	return slices.Compact(changed), err
}

// attempt writes the Secret of the CAs first. Of two concurrent writers, the second then fails with a conflict, and
// uses the CAs of the first in its next attempt.
func (c *Config) attempt(ctx context.Context, secrets typedcorev1.SecretInterface) ([]string, error) {
	dir, err := os.MkdirTemp("", "certgen")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	all, err := getSecret(ctx, secrets, pkiSecret)
	if err != nil {
		return nil, err
	}
	if all == nil || len(all.Data) == 0 {
		if err := checkNoPodSecrets(ctx, secrets); err != nil {
			return nil, err
		}
	}
	if err := c.loadFiles(dir, all); err != nil {
		return nil, err
	}
	if err := c.pki(dir).Open(); err != nil {
		return nil, err
	}
	names, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var files []string
	for _, n := range names {
		if !strings.HasSuffix(n.Name(), ".kubeconfig") { // derived from the other files
			files = append(files, n.Name())
		}
	}
	var changed []string
	update := func(secret *corev1.Secret, name string, files []string) error {
		wrote, err := putSecret(ctx, secrets, secret, name, dir, files)
		if wrote {
			changed = append(changed, name)
		}
		return err
	}
	if err := update(all, pkiSecret, files); err != nil {
		return changed, err
	}
	for name, files := range podSecrets {
		secret, err := getSecret(ctx, secrets, name)
		if err == nil {
			err = update(secret, name, files)
		}
		if err != nil {
			return changed, err
		}
	}
	return changed, nil
}

// checkNoPodSecrets returns an error if a pod's Secret exists while pkiSecret does not. New CAs would belong to another
// cluster, and would invalidate all tokens, certificates and the event log.
func checkNoPodSecrets(ctx context.Context, secrets typedcorev1.SecretInterface) error {
	for name := range podSecrets {
		s, err := getSecret(ctx, secrets, name)
		if err != nil {
			return err
		}
		if s != nil {
			const text = "secret %s is missing or empty, and %s exists: restore it from a copy, or delete every " +
				"Secret of Watershed to create a new cluster"
			return fmt.Errorf(text, pkiSecret, name)
		}
	}
	return nil
}

// loadFiles writes the existing files to dir: the files of the Secret, or else the files to import.
func (c *Config) loadFiles(dir string, all *corev1.Secret) error {
	if all != nil && len(all.Data) > 0 {
		for name, data := range all.Data {
			if name != filepath.Base(name) {
				return fmt.Errorf("secret %s has the key %q, which is not a file name", pkiSecret, name)
			}
			if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
				return err
			}
		}
		return nil
	}
	if c.ImportDir == "" {
		return nil
	}
	found, err := os.ReadDir(c.ImportDir)
	if err != nil {
		return fmt.Errorf("--import-dir: %w", err)
	}
	for _, f := range found {
		path := filepath.Join(c.ImportDir, f.Name())
		// kubeadm's directory of etcd's PKI is skipped, because Watershed has another. So is ..data, a link of a
		// mounted Secret.
		if info, err := os.Stat(path); err == nil && info.IsDir() {
			continue
		}
		data, err := os.ReadFile(path)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, f.Name()), data, 0o600)
		}
		if err != nil {
			return fmt.Errorf("--import-dir: %w", err)
		}
	}
	return nil
}

// pki returns the PKI in dir, for the Services of deploy/k8s.
func (c *Config) pki(dir string) *PKI {
	gateway := "gateway." + c.Namespace + ".svc"
	host := gateway
	if len(c.Hosts) > 0 {
		host = c.Hosts[0]
	}
	return &PKI{
		Dir:     dir,
		Gateway: URL(host, c.Port),
		// This Service includes gateways that are not ready yet. The first search domain of a pod resolves the short
		// name. A name with the namespace costs three lookups.
		ServicesGateway: URL("gateway-internal", 6443),

		MountPath: c.MountPath,
		Hosts: append([]string{"gateway", "gateway." + c.Namespace, gateway, gateway + ".cluster.local"},
			c.Hosts...),
		StoreHosts: []string{
			"*.etcd",
			"etcd." + c.Namespace + ".svc",
			"*.etcd." + c.Namespace + ".svc",
			"*.etcd." + c.Namespace + ".svc.cluster.local",
		},
	}
}

func getSecret(ctx context.Context, secrets typedcorev1.SecretInterface, name string) (*corev1.Secret, error) {
	s, err := secrets.Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return s, err
}

// putSecret writes files of dir to a Secret, if they differ. secret is the Secret as read, or nil if it does not exist.
func putSecret(ctx context.Context, secrets typedcorev1.SecretInterface, secret *corev1.Secret, name, dir string,
	files []string) (wrote bool, err error) {
	data := map[string][]byte{}
	for _, f := range files {
		if data[f], err = os.ReadFile(filepath.Join(dir, f)); err != nil {
			return false, err
		}
	}
	if secret == nil {
		_, err := secrets.Create(ctx, &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{
				Name:   name,
				Labels: map[string]string{"app.kubernetes.io/part-of": "watershed"},
			},
			Data: data,
		}, metav1.CreateOptions{})
		return err == nil, err
	}
	same := len(secret.Data) == len(data)
	for f, b := range data {
		same = same && bytes.Equal(secret.Data[f], b)
	}
	if same {
		return false, nil
	}
	secret.Data = data
	_, err = secrets.Update(ctx, secret, metav1.UpdateOptions{}) // at the resourceVersion that was read
	return err == nil, err
}
