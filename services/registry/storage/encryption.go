package storage

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/server/healthz"
	"k8s.io/apiserver/pkg/server/options/encryptionconfig"
	"k8s.io/apiserver/pkg/server/options/encryptionconfig/controller"
	encryptionmetrics "k8s.io/apiserver/pkg/server/options/encryptionconfig/metrics"
	"k8s.io/apiserver/pkg/storage/value"
	"k8s.io/apiserver/pkg/storage/value/encrypt/identity"

	"watershed.dev/platform/lifecycle"
)

// encryption encrypts values at rest with kube-apiserver's code. kube-apiserver and the registry read each other's
// values.
type encryption struct {
	// transformers is nil if encryption is not configured.
	transformers value.ResourceTransformers
	health       []healthz.HealthChecker
	// cancel closes the connections to KMS plugins. Nil: encryption is not configured.
	cancel context.CancelFunc
	// lastErr is the error of the last check, or nil.
	lastErr atomic.Pointer[error]
}

// StartHooks returns the start hook that maybeApplyResourceTransformers adds
// (k8s.io/apiserver/pkg/server/options/etcd.go), without poststarthook/. It has run: openEncryption starts the reload.
func (s *Storage) StartHooks() []string {
	if s.options.EncryptionAutomaticReload {
		return []string{"start-encryption-provider-config-automatic-reload"}
	}
	return nil
}

// openEncryption follows maybeApplyResourceTransformers in k8s.io/apiserver/pkg/server/options/etcd.go. ctx bounds the
// connections to KMS plugins. id identifies this process in metrics.
func openEncryption(ctx context.Context, o *Options, id string) (*encryption, error) {
	file, reload := o.EncryptionProviderConfig, o.EncryptionAutomaticReload
	switch {
	case file == "" && reload:
		return nil, errors.New("--encryption-provider-config-automatic-reload true: " +
			"--encryption-provider-config must be set too")
	case file == "":
		return &encryption{}, nil
	}
	kmsCtx, cancel := context.WithCancel(ctx)
	config, err := encryptionconfig.LoadEncryptionConfig(kmsCtx, file, reload, id)
	if err != nil {
		cancel()
		return nil, fmt.Errorf("--encryption-provider-config %q: %w", file, err)
	}
	encryptionmetrics.RecordEncryptionConfigLastConfigInfo(id, config.EncryptionFileContentHash)
	if !reload {
		return &encryption{
			transformers: encryptionconfig.StaticTransformers(config.Transformers),
			health:       config.HealthChecks,
			cancel:       cancel,
		}, nil
	}
	dynamic := encryptionconfig.NewDynamicTransformers(config.Transformers, config.HealthChecks[0], cancel,
		config.KMSCloseGracePeriod)
	reloader := controller.NewDynamicEncryptionConfiguration("encryption-provider-config", file, dynamic,
		config.EncryptionFileContentHash, id)
	go reloader.Run(ctx)
	return &encryption{
		transformers: dynamic,
		health:       []healthz.HealthChecker{dynamic},
		cancel:       cancel,
	}, nil
}

func (e *encryption) close() {
	if e.cancel != nil {
		e.cancel()
	}
}

// transformerFor returns the transformer that encrypts values of a resource.
func (e *encryption) transformerFor(gr schema.GroupResource) value.Transformer {
	if e.transformers == nil {
		return identity.NewEncryptCheckTransformer()
	}
	return e.transformers.TransformerForResource(gr)
}

// encryptionCheckPeriod is the interval of the health checks. The providers' own caches bound the calls to a KMS
// plugin.
const encryptionCheckPeriod = 5 * time.Second

// CheckEncryption runs the health checks of the encryption providers until ctx is done.
func (s *Storage) CheckEncryption(ctx context.Context) error {
	e := s.encryption
	if e.transformers == nil {
		<-ctx.Done()
		return ctx.Err()
	}
	for {
		if err := e.check(ctx); err != nil {
			e.lastErr.Store(&err)
		} else {
			e.lastErr.Store(nil)
		}
		if err := lifecycle.Sleep(ctx, encryptionCheckPeriod); err != nil {
			return err
		}
	}
}

// EncryptionErr returns the error of the last health check of the encryption providers, or nil.
func (s *Storage) EncryptionErr() error {
	if err := s.encryption.lastErr.Load(); err != nil {
		return *err
	}
	return nil
}

func (e *encryption) check(ctx context.Context) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "/", nil)
	if err != nil {
		return err
	}
	var errs []error
	for _, h := range e.health {
		if err := h.Check(req); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", h.Name(), err))
		}
	}
	return errors.Join(errs...)
}
